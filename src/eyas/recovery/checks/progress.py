"""How far the capture is, by the ledger and by the log, and which samples were given up."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.units import counted, format_count
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene
from eyas.store.ledger import FailedSample


@dataclass(frozen=True)
class ProgressFacts:
    """Samples by state, and the given-up ones with their reasons."""

    counts: dict[str, int]
    given_up: tuple[FailedSample, ...]
    log: str


def look(scene: Scene) -> ProgressFacts:
    counts: dict[str, int] = {}
    given_up: tuple[FailedSample, ...] = ()
    with scene.ledger() as ledger:
        if ledger is not None:
            counts = {state: count.samples for state, count in ledger.counts().items()}
            given_up = tuple(sample for sample in ledger.failed_samples() if sample.state == "set_aside")
    beats = [event for event in scene.events if event.get("event") == "progress"]
    log = (
        f"{beats[-1]['stage']}: {beats[-1]['done']} of {beats[-1]['total']} {beats[-1]['unit']}"
        if beats
        else ""
    )
    return ProgressFacts(counts, given_up, log)


def judge(scene: Scene, facts: ProgressFacts) -> Line:
    total = sum(facts.counts.values())
    if not total:
        return Line("progress", "skipped", "no sample is listed yet")
    by_state = ", ".join(
        f"{count} {state.replace('_', ' ')}" for state, count in facts.counts.items() if count
    )
    evidence = [f"ledger: {by_state}", *([f"log: {facts.log}"] if facts.log else [])]
    findings = []
    if facts.given_up:
        reasons = tuple(f"{s.id}: {s.reason} ({s.failures} tries)" for s in facts.given_up[:10])
        what = f"{counted(len(facts.given_up), 'sample')} given up after retries"
        findings.append(
            Finding(
                "samples-set-aside",
                "samples",
                "warn",
                what,
                reasons,
                mend="eyas extract --retry-failed",
                detail={"samples": len(facts.given_up)},
            )
        )
    stored, released = facts.counts.get("stored", 0), facts.counts.get("released", 0)
    fine = f"{format_count(stored)} of {format_count(total)} samples stored"
    if released:
        fine += f", {format_count(released)} trained on and released"
    return verdict("progress", findings, fine, evidence)


CHECK = Check("progress", look, judge)
