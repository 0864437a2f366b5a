"""Was everything in the store hashed since the machine was started, or its disk was moved?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class HashedFacts:
    """Segments, and those that were written before this boot and not hashed since."""

    num_segments: int
    doubtful: tuple[str, ...]


def look(scene: Scene) -> HashedFacts:
    if scene.store_place[1] is not None:
        raise scene.store_place[1]
    with scene.ledger() as ledger:
        segments = [] if ledger is None else ledger.segments()
    doubtful = []
    for segment in segments:
        since = segment.verified_boot == scene.boot
        if not since and scene.boot_time is not None and _seconds(segment.committed_at) < scene.boot_time:
            doubtful.append(segment.name)
    return HashedFacts(len(segments), tuple(doubtful))


def _seconds(at: str) -> float:
    try:
        return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def judge(scene: Scene, facts: HashedFacts) -> Line:
    if not facts.num_segments:
        return Line("hashed", "skipped", "nothing stored yet")
    if not facts.doubtful:
        return Line("hashed", "ok", "all of it written or hashed since the machine was started")
    count = f"{len(facts.doubtful)} of {facts.num_segments} segments"
    what = f"{count} were not hashed since the machine was started"
    finding = Finding("store-unhashed", "store", "warn", what, facts.doubtful[:5], mend="eyas verify --deep")
    return verdict("hashed", [finding], "", facts.doubtful)


CHECK = Check("hashed", look, judge)
