"""Does anything that the run needs lie where a reboot wipes it?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.config.resolve import model_folder
from eyas.hosts.disks import Filesystem
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class PlaceFacts:
    """What lies where: a name for people, a path, its filesystem."""

    places: tuple[tuple[str, str, Filesystem | None], ...]


def look(scene: Scene) -> PlaceFacts:
    project, layout = scene.project, scene.layout
    wanted: list[tuple[str, Path]] = [("the project", layout.root)]
    if layout.store.resolve() != layout.root / "store":
        wanted.append(("the store", layout.store.resolve()))
    wanted.append(("the target", model_folder(project.config, layout.root)))
    for source in project.config.data.sources:
        path = project.source_path(source.path)
        if layout.root not in path.parents:
            wanted.append((f"data source {path.name}", path))
    for needed in project.config.recovery.files:
        wanted.append((f"the copy of {Path(needed.path).name}", project.source_path(needed.source)))
    return PlaceFacts(tuple((name, str(path), scene.filesystem(path)) for name, path in wanted))


def judge(scene: Scene, facts: PlaceFacts) -> Line:
    findings, evidence = [], []
    for name, path, filesystem in facts.places:
        kind = "unknown" if filesystem is None else f"{filesystem.kind} at {filesystem.point}"
        evidence.append(f"{name}: {path} on {kind}")
        if filesystem is not None and filesystem.is_wiped:
            findings.append(
                Finding(
                    "on-wiped-filesystem",
                    path,
                    "warn",
                    f"{name} lies on {filesystem.kind}, which a reboot wipes",
                    (f"{path} is below {filesystem.point}",),
                    mend=f"move {path} to a disk and mend eyas.toml",
                )
            )
    return verdict(
        "places", findings, f"{len(facts.places)} places, none of them wiped by a reboot", evidence
    )


CHECK = Check("places", look, judge)
