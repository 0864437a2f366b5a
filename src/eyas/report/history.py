"""Attempts, what they did, and what went wrong: the timeline of a project."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from eyas.base.clock import parse_time
from eyas.pipeline.attempt import EVENTS_NAME, attempt_folders, parse_events
from eyas.report.growing import Growing
from eyas.report.status import BROKEN
from eyas.report.words import ended_text
from eyas.stages.project import Project
from eyas.store.ledger import Ledger

MAX_POINTS = 240
"""Points of a curve; longer series are thinned by means over equal stretches."""
_MAX_INCIDENTS = 200
RECOVERY = "recovery-"
"""How todos begin that mend something; those of other phases are incidents only when they are blocked."""


@dataclass(frozen=True)
class StageRun:
    """One stage within an attempt; ``ended`` is None when the attempt ended first."""

    stage: str
    action: str
    why: str
    started: str
    ended: str | None
    seconds: float
    numbers: dict[str, Any]


@dataclass(frozen=True)
class RatePoint:
    """Units per second between two beats of an attempt; ``done`` counts all attempts."""

    at: str
    rate: float
    done: int


@dataclass(frozen=True)
class AttemptView:
    """One start of the pipeline; ``outcome`` is ``unfinished`` when it was killed (or still runs)."""

    name: str
    verb: str
    started: str
    last_event: str
    seconds: float
    outcome: str
    what: str | None
    stages: tuple[StageRun, ...]
    rates: dict[str, tuple[RatePoint, ...]]


@dataclass(frozen=True)
class Incident:
    """Something that went wrong; ``mended`` says what was done about it, None when nothing is known."""

    at: str
    kind: str
    text: str
    mended: str | None


_Beat = tuple[str, float, str, int]
"""Label, total, time and done."""


@dataclass
class _Open:
    """An attempt as far as its events were read."""

    first: str = ""
    last: str = ""
    verb: str = ""
    end: dict[str, Any] | None = None
    stages: list[StageRun] = field(default_factory=list)
    beats: dict[str, list[_Beat]] = field(default_factory=dict)


_logs: dict[Path, tuple[Growing, _Open]] = {}
_turn = Lock()


def attempts(project: Project) -> tuple[AttemptView, ...]:
    """All attempts, oldest first; of a log that was read before only what was added is read."""
    found = []
    for folder in attempt_folders(project.layout.logs):
        with contextlib.suppress(OSError), _turn:
            view = _attempt(folder)
            if view is not None:
                found.append(view)
    return tuple(found)


def _attempt(folder: Path) -> AttemptView | None:
    log, reading = _logs.get(folder) or (Growing(folder / EVENTS_NAME), _Open())
    lines, is_new = log.news()
    if is_new:
        reading = _Open()
    _logs[folder] = (log, reading)
    for event in parse_events(lines):
        with contextlib.suppress(*BROKEN):
            _note(reading, event)
    if not reading.last:
        return None
    end = reading.end
    return AttemptView(
        name=folder.name,
        verb=reading.verb,
        started=reading.first,
        last_event=reading.last,
        seconds=_between(reading.first, reading.last),
        outcome=str(end.get("outcome")) if end else "unfinished",
        what=str(end["what"]) if end and end.get("what") else None,
        stages=tuple(_unended(stage, reading.last) for stage in reading.stages),
        rates={stage: _rates(beats) for stage, beats in reading.beats.items()},
    )


def _note(reading: _Open, event: dict[str, Any]) -> None:
    kind = event["event"]
    reading.first, reading.last = reading.first or event["at"], event["at"]
    if kind == "attempt started":
        reading.verb = str(event.get("verb", ""))
    elif kind == "attempt ended":
        reading.end = event
    elif kind == "progress":
        _note_beat(reading, event)
    elif kind in ("stage started", "stage ended"):
        _note_stage(reading, event, kind)


def _note_beat(reading: _Open, event: dict[str, Any]) -> None:
    beat = (str(event["label"]), float(event["total"]), str(event["at"]), int(event["done"]))
    reading.beats.setdefault(str(event["stage"]), []).append(beat)


def _note_stage(reading: _Open, event: dict[str, Any], kind: str) -> None:
    name, at = str(event["stage"]), str(event["at"])
    if kind == "stage started":
        action, why = str(event.get("action", "")), str(event.get("why", ""))
        reading.stages.append(StageRun(name, action, why, at, None, 0.0, {}))
    elif reading.stages and reading.stages[-1].stage == name:
        open_ = reading.stages.pop()
        numbers = event.get("numbers")
        reading.stages.append(
            StageRun(
                name,
                open_.action,
                open_.why,
                open_.started,
                at,
                _between(open_.started, at),
                numbers if isinstance(numbers, dict) else {},
            )
        )


def _unended(stage: StageRun, last: str) -> StageRun:
    if stage.ended is not None:
        return stage
    seconds = _between(stage.started, last)
    return StageRun(stage.stage, stage.action, stage.why, stage.started, None, seconds, {})


def _rates(beats: list[_Beat]) -> tuple[RatePoint, ...]:
    """Rates between beats of the same phase, thinned."""
    step = max(1, -(-len(beats) // MAX_POINTS))
    points, begun = [], 0
    for index in range(1, len(beats)):
        label, total, at, done = beats[index]
        if (label, total) != beats[begun][:2] or done < beats[begun][3]:
            begun = index
            continue
        if index - begun < step and index + 1 < len(beats):
            continue
        seconds = _between(beats[begun][2], at)
        if seconds > 0:
            points.append(RatePoint(at, (done - beats[begun][3]) / seconds, done))
        begun = index
    return tuple(points)


def incidents(project: Project, tries: tuple[AttemptView, ...], running: str | None) -> tuple[Incident, ...]:
    """What went wrong, oldest first (the newest 200).

    Args:
        running: name of the attempt that is at work, which is no incident.
    """
    found = []
    for index, attempt in enumerate(tries):
        if attempt.outcome in ("done", "Stopped") or attempt.name == running:
            continue
        after = tries[index + 1].name if index + 1 < len(tries) else None
        text = ended_text(attempt.outcome, attempt.what)
        mended = f"{after} went on from there" if after else None
        found.append(Incident(attempt.last_event, "attempt", f"{attempt.name} {text}", mended))
    with contextlib.suppress(*BROKEN), Ledger.open_read_only(project.layout.ledger) as ledger:
        for event in ledger.events(kind="sample_failed", limit=_MAX_INCIDENTS):
            sample, reason = event.detail.get("sample"), event.detail.get("reason")
            state = ledger.state_of(str(sample))
            mended = "captured later" if state in ("stored", "released") else None
            found.append(Incident(event.at, "sample", f"{sample} failed: {reason}", mended))
        done = {todo.id: todo for todo in ledger.todos()}
        for todo in done.values():
            if not todo.id.startswith(RECOVERY) and todo.status != "blocked":
                continue  # a step of the ordinary course of things
            mended = todo.evidence if todo.status == "completed" else None
            found.append(Incident(todo.changed_at, "todo", f"{todo.content} ({todo.status})", mended))
    return tuple(sorted(found, key=lambda incident: incident.at)[-_MAX_INCIDENTS:])


def failure_reasons(project: Project) -> dict[str, int]:
    """How often samples failed, by reason."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(*BROKEN), Ledger.open_read_only(project.layout.ledger) as ledger:
        counts.update(str(e.detail.get("reason")) for e in ledger.events(kind="sample_failed", limit=100_000))
    return dict(counts.most_common(20))


def _between(start: str, end: str) -> float:
    first, last = parse_time(start), parse_time(end)
    return max(0.0, (last - first).total_seconds()) if first and last else 0.0
