"""Is there room for what is still to be written, in bytes and in files?"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.units import format_bytes, format_count, parse_bytes
from eyas.hosts.disks import Filesystem
from eyas.recovery.findings import DISK_EXIT, Check, Finding, Line, verdict
from eyas.recovery.scene import Scene
from eyas.report.forecast import Forecast, forecast
from eyas.report.status import is_finished

FEW_INODES = 1000
"""Fewer free inodes than this end a run by names, not by bytes."""


@dataclass(frozen=True)
class SpaceFacts:
    """The store's filesystem and the forecast; None where either is not known."""

    filesystem: Filesystem | None
    forecast: Forecast | None
    is_finished: bool = False


def look(scene: Scene) -> SpaceFacts:
    finished = is_finished(scene.project)
    found = None if finished else forecast(scene.project)
    return SpaceFacts(scene.filesystem(scene.layout.segments), found, finished)


def judge(scene: Scene, facts: SpaceFacts) -> Line:
    disk, found = facts.filesystem, facts.forecast
    if disk is None:
        return Line("space", "unknown", "the machine does not say how much is free")
    config = scene.project.config.disk
    reserve, warn = parse_bytes(config.reserve), parse_bytes(config.warn)
    left = 0 if found is None else found.left_bytes
    room = disk.free_bytes - reserve
    if config.budget is not None and found is not None:
        room = min(room, found.room_bytes)
    free, kept = format_bytes(disk.free_bytes), format_bytes(reserve)
    evidence = [f"{free} of {format_bytes(disk.total_bytes)} free at {disk.point}, {kept} stay free"]
    evidence += [] if found is None else [f"forecast ({found.basis}): {format_bytes(left)} still to write"]
    findings = []
    if left > 0 and room <= 0:
        findings.append(
            Finding(
                "disk-full",
                disk.point,
                "failed",
                f"no room at {disk.point}: {free} free, of which {kept} stay free",
                tuple(evidence),
                mend="free space, or lower disk.reserve; eyas store gc lists what may go",
                exit_code=DISK_EXIT,
            )
        )
    elif left > max(0, room):
        findings.append(
            Finding(
                "disk-short",
                disk.point,
                "warn",
                f"{format_bytes(left)} still to write, {format_bytes(max(0, room))} may be",
                tuple(evidence),
                mend="free space before the run gets there (it pauses); eyas store gc lists what may go",
                exit_code=DISK_EXIT,
            )
        )
    if disk.num_inodes and disk.free_inodes < FEW_INODES:
        findings.append(
            Finding(
                "inodes-short",
                disk.point,
                "failed" if disk.free_inodes == 0 else "warn",
                f"{disk.free_inodes} free inodes at {disk.point}: no new files although bytes are free",
                (f"{format_count(disk.free_inodes)} of {format_count(disk.num_inodes)} inodes are free",),
                mend="remove or pack small files there; eyas store compact merges segments",
                exit_code=DISK_EXIT,
            )
        )
    if facts.is_finished:
        need = "nothing left to write"
    else:
        need = "nothing known yet" if found is None else f"{format_bytes(left)} still to write"
    low = ", low" if disk.free_bytes < warn else ""
    return verdict("space", findings, f"{free} free{low}; {need}", evidence)


CHECK = Check("space", look, judge)
