"""Numbers of the view models as words that every screen shares."""

from __future__ import annotations

from eyas.base.units import format_amount, format_bytes, format_count
from eyas.report.now import Beside, Running
from eyas.report.stage_status import StageStatus

ENDED = {
    "done": "ended well",
    "running": "runs",
    "Stopped": "was stopped, state saved",
    "unfinished": "did not end by itself (killed, or the machine went down)",
}


def ended_text(outcome: str, what: str | None) -> str:
    """How an attempt ended: ``ended well``, or the error's code with what it says."""
    return ENDED.get(outcome) or f"ended with {outcome}: {what or 'no reason given'}"


def count_text(stage: StageStatus) -> str:
    """How much of a stage is done: ``80 answers``, ``18 of 20 samples 90%``, ``5 prompts, length 2.17``."""
    if stage.total is None or stage.state in ("waiting", "skipped"):
        return ""
    if stage.done == stage.total:
        unit = stage.unit.removesuffix("s") if stage.done == 1 else stage.unit
        text = f"{format_count(stage.done)} {unit}"
    else:
        share = f" {100 * stage.done / stage.total:.0f}%" if stage.total else ""
        text = f"{format_count(stage.done)} of {format_count(stage.total)} {stage.unit}{share}"
    length = stage.detail.get("acceptance_length")
    if stage.name == "evaluate" and isinstance(length, int | float):
        text += f", length {length:.2f}"
    return text


def done_text(running: Running | Beside) -> str:
    """``capture 120 of 472 samples``."""
    done = format_bytes(running.done) if running.unit == "bytes" else format_count(running.done)
    return f"{running.label} {done} of {format_amount(running.total, running.unit)}"


def rate_text(running: Running) -> str:
    """``94 answers/s``, ``210.4 MB/s``; ``no rate yet`` where none is known."""
    if not running.rate:
        return "no rate yet"
    if running.unit == "bytes":
        return f"{format_bytes(running.rate)}/s"
    return f"{format_count(running.rate) if running.rate >= 10 else f'{running.rate:.2g}'} {running.unit}/s"


def time_left_text(running: Running) -> str:
    """``12 min to 15 min left``, or nothing when nothing is left."""
    low, high = running.seconds_left_low, running.seconds_left_high
    if running.seconds_left is None or running.done >= running.total:
        return ""
    if low is None:
        return "too early to say how long"
    if high is None:
        return f"{rough_seconds(low)} left or much more: it hardly moves"
    if rough_seconds(low) == rough_seconds(high):
        return f"about {rough_seconds(low)} left"
    return f"{rough_seconds(low)} to {rough_seconds(high)} left"


def rough_seconds(seconds: float) -> str:
    """A duration as precise as an estimate deserves: ``40 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    if seconds < 129_600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} d"


def at_minute(at: str) -> str:
    """``2026-11-30 03:12`` of a time in UTC."""
    return f"{at[:10]} {at[11:16]}" if len(at) >= 16 and at[10] == "T" else at
