"""States that a dead server of this project left in shared memory or elsewhere, waiting to be taken."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from eyas.base.files import tree_bytes
from eyas.base.units import counted, format_bytes
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene
from eyas.targets.serving.dumps import dump_base, read_owner


@dataclass(frozen=True)
class DumpFolder:
    """One dump folder of this project; ``num_files`` counts what waits in it."""

    path: str
    alive: bool
    num_files: int
    num_bytes: int


def look(scene: Scene) -> tuple[DumpFolder, ...]:
    text = ""
    with contextlib.suppress(OSError):
        text = (scene.layout.state / "project-id").read_text(encoding="utf-8").strip()
    if not text.isalnum():
        return ()  # no server was ever started here
    place = dump_base(scene.project.config.serve.dump_dir, scene.layout.root) / f"eyas-{text}"
    found = []
    for folder in sorted(place.iterdir()) if place.is_dir() else []:
        owner = read_owner(folder) if folder.is_dir() and not folder.is_symlink() else None
        if owner is not None and owner.project == text:
            files = [path for path in folder.iterdir() if path.name != "eyas-owner.json"]
            found.append(DumpFolder(str(folder), owner.alive, len(files), tree_bytes(folder)))
    return tuple(found)


def judge(scene: Scene, facts: tuple[DumpFolder, ...]) -> Line:
    if not facts:
        return Line("dumps", "ok", "no dump folder of this project")
    findings = [
        Finding(
            "dumps-stale",
            folder.path,
            "warn",
            f"{counted(folder.num_files, 'dump')} of a dead server ({format_bytes(folder.num_bytes)}) lie in "
            f"{Path(folder.path).parent}",
            (f"{folder.path}: its server does not run any more",),
            detail={"path": folder.path, "bytes": folder.num_bytes},
        )
        for folder in facts
        if not folder.alive
    ]
    waiting = sum(folder.num_files for folder in facts)
    return verdict("dumps", findings, f"{len(facts)} folders of running servers, {waiting} dumps wait")


CHECK = Check("dumps", look, judge)
