"""Was everything in the store hashed since the machine was started, its disk moved, or it was written to?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eyas.base.units import counted
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene
from eyas.store.doubt import is_doubtful
from eyas.store.ledger import DOUBTFUL


@dataclass(frozen=True)
class HashedFacts:
    """Segments by how much they can be believed.

    ``unhashed`` are from before this boot and were not hashed since; ``changed`` were written to after they
    were hashed; ``wrong`` did not hash to what was written when an earlier look read them.
    """

    num_segments: int
    unhashed: tuple[str, ...]
    changed: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def look(scene: Scene) -> HashedFacts:
    if scene.store_place[1] is not None:
        raise scene.store_place[1]
    with scene.ledger() as ledger:
        segments = [] if ledger is None else ledger.segments()
    damaged = {Path(f.place).name for f in scene.verification.findings if f.part == "store"}
    unhashed, changed, wrong = [], [], []
    for segment in segments:
        since = segment.verified_boot == scene.boot
        if not since and scene.boot_time is not None and _seconds(segment.committed_at) < scene.boot_time:
            unhashed.append(segment.name)
        elif scene.deep or segment.name in damaged:
            continue  # this very look has hashed it, or names it
        elif segment.verified_boot == DOUBTFUL:
            wrong.append(segment.name)
        elif is_doubtful(scene.layout, segment):
            changed.append(segment.name)
    return HashedFacts(len(segments), tuple(unhashed), tuple(changed), tuple(wrong))


def _seconds(at: str) -> float:
    try:
        return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def judge(scene: Scene, facts: HashedFacts) -> Line:
    if not facts.num_segments:
        return Line("hashed", "skipped", "nothing stored yet")
    findings = []
    if facts.wrong:
        what = f"{counted(len(facts.wrong), 'segment')} {_were(facts.wrong)} found damaged by an earlier look"
        findings.append(Finding("segment-found-damaged", "store", "damage", what, facts.wrong[:5]))
    if facts.unhashed:
        count = f"{len(facts.unhashed)} of {counted(facts.num_segments, 'segment')}"
        what = f"{count} {_were(facts.unhashed)} not hashed since the machine was started"
        findings.append(_finding("store-unhashed", what, facts.unhashed))
    if facts.changed:
        count = counted(len(facts.changed), "segment")
        what = f"{count} {_were(facts.changed)} changed after being written and hashed"
        findings.append(_finding("store-changed", what, facts.changed))
    fine = "all of it written or hashed since the machine was started"
    return verdict("hashed", findings, fine, (*facts.wrong, *facts.unhashed, *facts.changed))


def _finding(code: str, what: str, names: tuple[str, ...]) -> Finding:
    return Finding(code, "store", "warn", what, names[:5], mend="eyas verify --deep")


def _were(names: tuple[str, ...]) -> str:
    return "was" if len(names) == 1 else "were"


CHECK = Check("hashed", look, judge)
