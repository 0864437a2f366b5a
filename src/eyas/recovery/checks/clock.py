"""Does the clock agree with what the project has written?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from eyas.base.units import format_seconds
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene

TOLERANCE_SECONDS = 120.0


@dataclass(frozen=True)
class ClockFacts:
    """Seconds since the epoch: now, and of the newest event in the logs (None: no event)."""

    now: float
    newest_event: float | None


def look(scene: Scene) -> ClockFacts:
    return ClockFacts(scene.now(), _seconds(str(scene.events[-1].get("at"))) if scene.events else None)


def _seconds(at: str) -> float | None:
    try:
        return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def judge(scene: Scene, facts: ClockFacts) -> Line:
    ahead = 0.0 if facts.newest_event is None else facts.newest_event - facts.now
    if ahead <= TOLERANCE_SECONDS:
        return Line("clock", "ok", "agrees with the logs")
    finding = Finding(
        "clock-behind",
        "clock",
        "warn",
        f"the clock is {format_seconds(ahead)} behind the newest event of the logs",
        (f"now {facts.now:.0f}, newest event {facts.newest_event or 0:.0f} (seconds since 1970)",),
        mend="set the clock (timedatectl set-ntp true)",
    )
    return verdict("clock", [finding], "")


CHECK = Check("clock", look, judge)
