"""Are the filesystems of project and store the ones they were, and can they be written?"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.errors import StoreNotMounted
from eyas.hosts.disks import Filesystem
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class MountFacts:
    """Filesystems below the project and its store; what the ledger says of the store's place."""

    filesystems: tuple[Filesystem, ...]
    moved: str | None
    not_mounted: StoreNotMounted | None


def look(scene: Scene) -> MountFacts:
    layout = scene.layout
    found = [scene.filesystem(layout.root), scene.filesystem(layout.segments)]
    moved, missing = scene.store_place
    unique = {f.point: f for f in found if f is not None}
    return MountFacts(tuple(unique.values()), moved, missing)


def judge(scene: Scene, facts: MountFacts) -> Line:
    evidence = [
        f"{f.path}: {f.kind} on {f.source} at {f.point}, {'read-only' if f.read_only else 'writable'}"
        for f in facts.filesystems
    ]
    findings = [
        Finding(
            "filesystem-read-only",
            f.point,
            "failed",
            f"the filesystem at {f.point} is read-only",
            (f"{f.source} ({f.kind}) is mounted with ro: a filesystem turns so after errors of its disk",),
            mend=f"look at dmesg, then: mount -o remount,rw {f.point}",
        )
        for f in facts.filesystems
        if f.read_only
    ]
    if facts.not_mounted is not None:
        error = facts.not_mounted
        findings.append(
            Finding(
                "store-not-mounted",
                str(scene.layout.store),
                "failed",
                error.what,
                (error.why or "",),
                mend="mount the store's disk, then: eyas recover",
            )
        )
    if facts.moved is not None:
        findings.append(
            Finding(
                "store-moved",
                str(scene.layout.store),
                "warn",
                "the store lies on another disk than before: nothing in it was hashed there",
                (facts.moved,),
            )
        )
    if not facts.filesystems:
        return Line("mounts", "unknown", "the machine does not say where the project lies")
    return verdict(
        "mounts", findings, ", ".join(f"{f.kind} at {f.point}" for f in facts.filesystems), evidence
    )


CHECK = Check("mounts", look, judge)
