"""Was there a crash or a reboot since the last attempt?"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.units import format_seconds
from eyas.pipeline.lock import Holder, last_holder
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import LastAttempt, Scene
from eyas.report.words import ENDED


@dataclass(frozen=True)
class BootFacts:
    """This boot, and the last attempt."""

    boot: str
    boot_time: float | None
    last: LastAttempt | None
    last_writer: Holder | None
    is_running: bool


def look(scene: Scene) -> BootFacts:
    return BootFacts(
        scene.boot,
        scene.boot_time,
        scene.last_attempt,
        last_holder(scene.layout.state),
        scene.holder is not None,
    )


def judge(scene: Scene, facts: BootFacts) -> Line:
    up = "" if facts.boot_time is None else f"up {format_seconds(max(0, scene.now() - facts.boot_time))}"
    last, writer = facts.last, facts.last_writer
    if last is None:
        return Line("boot", "ok", f"{up}; no attempt yet".lstrip("; "))
    rebooted = writer is not None and facts.boot not in ("unknown", writer.boot)
    evidence = [
        f"{last.name} (eyas {last.verb}) began {last.started_at}, its last event was {last.last_event_at}",
        f"this boot is {facts.boot}"
        + (f", the last writer's was {writer.boot}" if writer is not None and rebooted else ""),
    ]
    outcome = last.outcome or "unfinished"
    if last.outcome is None and not facts.is_running:
        how = "the machine was started again since" if rebooted else "it was killed; the machine stayed up"
        finding = Finding(
            "attempt-killed",
            last.name,
            "warn",
            f"{last.name} did not end by itself: {how}",
            tuple(evidence),
            detail={"rebooted": rebooted},
        )
        return verdict("boot", [finding], "", evidence)
    state = "running" if facts.is_running else f"{last.name} {ENDED.get(outcome) or f'ended with {outcome}'}"
    return Line("boot", "ok", f"{up}; {state}".lstrip("; "), tuple(evidence))


CHECK = Check("boot", look, judge)
