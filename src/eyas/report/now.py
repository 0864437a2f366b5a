"""The work that goes on now, and how the newest attempt ended, from its events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from eyas.base.clock import parse_time, seconds_since
from eyas.pipeline.lock import Holder
from eyas.report.eta import time_left

STALL_SECONDS = 900.0
"""A run without an event for so long is called stalled; loading a large target takes minutes."""
_NOT_FACTS = ("at", "event", "stage", "label", "unit", "done", "total", "rate")
_SHOWN_MESSAGES = 5


@dataclass(frozen=True)
class Beside:
    """A stage that works beside the one that is shown."""

    stage: str
    label: str
    done: int
    total: int
    unit: str


@dataclass(frozen=True)
class Running:
    """The work that is going on; ``rate`` is in units per second, of this phase in this attempt.

    ``seconds_left`` is None while no rate is known; the range ``seconds_left_low`` to ``seconds_left_high``
    appears once enough was seen to say how unsteady the rate is. All are of the phase, not of the whole
    run. ``silent_seconds`` counts from the last event; ``facts`` are what the work tells beside its count
    (loss, bytes). ``beside`` are stages that work at the same time, as capture does beside training.
    """

    pid: int
    host: str
    verb: str
    since: str
    stage: str
    label: str
    done: int
    total: int
    unit: str
    rate: float
    seconds_left: float | None
    seconds_left_low: float | None
    seconds_left_high: float | None
    silent_seconds: float | None
    stalled: bool
    facts: dict[str, float | int | str]
    beside: tuple[Beside, ...] = ()


@dataclass(frozen=True)
class LastAttempt:
    """The newest attempt; ``outcome`` is ``unfinished`` when it was killed, ``running`` while it runs."""

    name: str
    started: str | None
    last_event: str | None
    last_event_seconds: float | None
    outcome: str
    what: str | None
    hint: str | None


@dataclass(frozen=True)
class Message:
    """A line that the run said."""

    at: str
    stage: str
    text: str


def running(holder: Holder, events: list[dict[str, Any]], now: datetime | None = None) -> Running:
    """What the holder of the lock does, by the events of its attempt (those of an earlier one count not)."""
    started: dict[str, Any] = next((e for e in reversed(events) if e["event"] == "attempt started"), {})
    own = events if started.get("pid") == holder.pid else []
    beats = [event for event in own if event["event"] == "progress"]
    at_work = _at_work(own, beats)
    beat = at_work[0] if at_work else {}
    beats = [other for other in beats if other.get("stage") == beat.get("stage")]
    rate, done, total = _number(beat.get("rate")), _number(beat.get("done")), _number(beat.get("total"))
    left = time_left(_phase(beats), total)
    silent = seconds_since(own[-1]["at"] if own else holder.since, now)
    return Running(
        pid=holder.pid,
        host=holder.host,
        verb=holder.verb,
        since=holder.since,
        stage=str(beat.get("stage", "")),
        label=str(beat.get("label", "")),
        done=int(done),
        total=int(total),
        unit=str(beat.get("unit", "")),
        rate=rate,
        seconds_left=max(0.0, total - done) / rate if rate > 0 else None,
        seconds_left_low=left.low_seconds if left else None,
        seconds_left_high=left.high_seconds if left else None,
        silent_seconds=silent,
        stalled=silent is not None and silent > STALL_SECONDS,
        facts={k: v for k, v in beat.items() if k not in _NOT_FACTS and isinstance(v, int | float | str)},
        beside=tuple(
            Beside(
                str(other.get("stage", "")),
                str(other.get("label", "")),
                int(_number(other.get("done"))),
                int(_number(other.get("total"))),
                str(other.get("unit", "")),
            )
            for other in at_work[1:]
        ),
    )


def _at_work(events: list[dict[str, Any]], beats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last beat of each stage that has not ended since, the later stages of the pipeline first."""
    last: dict[str, dict[str, Any]] = {}
    for beat in beats:
        last[str(beat.get("stage", ""))] = beat
    open_: list[str] = []
    for event in events:
        stage = str(event.get("stage", ""))
        if event["event"] == "stage started":
            open_ = [name for name in open_ if name != stage] + [stage]
        elif event["event"] == "stage ended":
            open_ = [name for name in open_ if name != stage]
    found = [last[name] for name in reversed(open_) if name in last]
    return found if found else beats[-1:]


def last_attempt(folder: Path, events: list[dict[str, Any]], is_running: bool) -> LastAttempt:
    """How an attempt stands or ended."""
    end = next((e for e in reversed(events) if e["event"] == "attempt ended"), None)
    # a run that mends goes on in a new attempt: the lock may outlive the end of this one for a moment
    outcome = str(end.get("outcome")) if end else ("running" if is_running else "unfinished")
    last = events[-1]["at"] if events else None
    return LastAttempt(
        name=folder.name,
        started=events[0]["at"] if events else None,
        last_event=last,
        last_event_seconds=seconds_since(last),
        outcome=outcome,
        what=_text(end, "what"),
        hint=_text(end, "hint"),
    )


def messages(events: list[dict[str, Any]]) -> tuple[Message, ...]:
    """The newest lines that the run said, oldest of them first."""
    said = [e for e in events if e["event"] == "message"][-_SHOWN_MESSAGES:]
    return tuple(Message(e["at"], str(e.get("stage", "")), str(e.get("text", ""))) for e in said)


def _phase(beats: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(seconds, done) of the beats that belong to the last one's phase."""
    found: list[tuple[float, float]] = []
    for beat in reversed(beats):
        same = all(beat.get(key) == beats[-1].get(key) for key in ("stage", "label", "total"))
        at, done = parse_time(beat["at"]), _number(beat.get("done"))
        if not same or at is None or (found and (at.timestamp() > found[-1][0] or done > found[-1][1])):
            break
        found.append((at.timestamp(), done))
    return found[::-1]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _text(event: dict[str, Any] | None, key: str) -> str | None:
    value = event.get(key) if event else None
    return None if value is None else str(value)
