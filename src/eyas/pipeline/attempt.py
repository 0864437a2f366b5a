"""One attempt: a folder of logs that is never overwritten, and the events in it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from eyas.base.clock import utc_now_text
from eyas.base.progress import Progress

EVENTS_NAME = "events.jsonl"
BEAT_SECONDS = 5.0
"""How often progress is written into the events of an attempt."""
NO_RUN = ("recover",)
"""Attempts of these verbs do none of the pipeline's work."""
Events = list[dict[str, Any]]
_PRIVATE = "notify"
"""A table whose values may hold a password, and change no result."""


def next_number(logs: Path) -> int:
    """The lowest attempt number that no folder has."""
    folders = attempt_folders(logs)
    return int(folders[-1].name.rpartition("-")[2]) + 1 if folders else 1


def attempt_folders(logs: Path) -> list[Path]:
    """All attempts, oldest first."""
    return sorted(p for p in logs.glob("attempt-*") if p.is_dir()) if logs.is_dir() else []


def read_events(folder: Path) -> Events:
    """The events of an attempt, details beside ``at`` and ``event``; a torn line is left out."""
    with contextlib.suppress(OSError):
        return parse_events((folder / EVENTS_NAME).read_text(encoding="utf-8", errors="replace").splitlines())
    return []


def runs(logs: Path, read: Callable[[Path], Events] = read_events) -> Iterator[tuple[Path, Events]]:
    """Attempts that did the pipeline's work, newest first, with those of their events that ``read`` gives."""
    for folder in reversed(attempt_folders(logs)):
        events = read(folder)
        if events and events[0].get("verb") not in NO_RUN:
            yield folder, events


def may_be_written_down(override: str) -> bool:
    """Whether a ``dotted.key=value`` may stand in logs and messages."""
    return override.partition("=")[0].split(".")[0].strip() != _PRIVATE


def recent_events(folder: Path, max_bytes: int = 1 << 18) -> Events:
    """The first event of an attempt and those of the last ``max_bytes`` of its log, oldest first.

    Days of beats make a log too long to be read whole by a verb that has to answer at once.
    """
    path = folder / EVENTS_NAME
    try:
        with open(path, "rb") as file:
            first = file.readline()
            start = max(len(first), path.stat().st_size - max_bytes)
            file.seek(start)
            rest = file.read().split(b"\n")
    except OSError:
        return []
    if start > len(first):
        rest = rest[1:]  # it may begin in the middle of a line
    return parse_events([first, *rest])


def parse_events(lines: Iterable[str | bytes]) -> Events:
    """Lines of a log as events; what is no whole event is left out."""
    events: Events = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            events.append({"at": str(record["at"]), "event": record["kind"], **record["detail"]})
    return events


class Attempt:
    """Writes the events of one attempt; create it while holding the lock.

    The lines have the form of the ledger's events, from which a lost ledger is rebuilt.

    Attributes:
        number: the ledger's number of the attempt.
        folder: ``logs/attempt-0007``.
    """

    def __init__(self, logs: Path, number: int, verb: str, overrides: Sequence[str] = ()) -> None:
        self.number = number
        self._turn = threading.Lock()
        self.folder = logs / f"attempt-{self.number:04d}"
        self.folder.mkdir(parents=True)
        self._events: IO[str] = open(self.folder / EVENTS_NAME, "a", encoding="utf-8")  # noqa: SIM115
        self._point_latest(logs)
        given = [override for override in overrides if may_be_written_down(override)]
        self.event("attempt started", verb=verb, pid=os.getpid(), **({"set": given} if given else {}))

    def _point_latest(self, logs: Path) -> None:
        link = logs / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder.name)
        os.replace(link, logs / "latest")

    def event(self, kind: str, **detail: object) -> None:
        """Write one event; a log that cannot be written (disk full) does not end the work."""
        with contextlib.suppress(OSError), self._turn:
            record = {"at": utc_now_text(), "attempt": self.number, "kind": kind, "detail": detail}
            self._events.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            self._events.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._events.close()


class RecordedProgress:
    """Passes progress on to a listener and beats it into the events of an attempt."""

    def __init__(self, attempt: Attempt, listener: Progress, stage: str) -> None:
        self._attempt, self._listener, self._stage = attempt, listener, stage
        self._label, self._unit = "", ""
        self._done = self._begun = self._total = 0
        self._started = self._last_beat = time.monotonic()
        self._facts: dict[str, float | int | str] = {}

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        self._label, self._unit, self._total = label, unit, total
        self._begun = self._done = done
        self._started = self._last_beat = time.monotonic()
        self._listener.start(label, total=total, unit=unit, done=done)
        self._beat()

    def advance(self, units: int, **facts: float | int | str) -> None:
        self._done += units
        self._facts.update(facts)
        self._listener.advance(units, **facts)
        if time.monotonic() - self._last_beat >= BEAT_SECONDS or self._done >= self._total:
            self._beat()

    def say(self, message: str) -> None:
        self._attempt.event("message", stage=self._stage, text=message)
        self._listener.say(message)

    def _beat(self) -> None:
        now = time.monotonic()
        self._last_beat = now
        elapsed = now - self._started
        self._attempt.event(
            "progress",
            stage=self._stage,
            label=self._label,
            unit=self._unit,
            done=self._done,
            total=self._total,
            rate=round((self._done - self._begun) / elapsed, 3) if elapsed > 0 else 0.0,
            **{k: v for k, v in self._facts.items() if k not in ("stage", "label", "unit")},
        )
