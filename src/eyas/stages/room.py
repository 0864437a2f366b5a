"""The limits of a project's disk, as its configuration sets them."""

from __future__ import annotations

from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.base.units import parse_bytes
from eyas.stages.project import Project
from eyas.store.room import Room


def project_room(project: Project, progress: Progress, stop: StopFlag) -> Room:
    """How much may be written, and whether a run waits when that is nothing."""
    disk = project.config.disk
    return Room(
        root=project.layout.root,
        reserve_bytes=parse_bytes(disk.reserve),
        warn_bytes=parse_bytes(disk.warn),
        budget_bytes=parse_bytes(disk.budget) if disk.budget else None,
        wait=disk.when_full == "wait",
        look_again_seconds=disk.look_again_seconds,
        progress=progress,
        stop=stop,
    )
