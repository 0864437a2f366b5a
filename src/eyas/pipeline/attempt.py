"""One attempt: a folder of logs that is never overwritten, and the events in it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eyas.base.clock import utc_now_text
from eyas.base.progress import Progress

EVENTS_NAME = "events.jsonl"
BEAT_SECONDS = 5.0
"""How often progress is written into the events of an attempt."""
NO_RUN = ("recover",)
"""Attempts of these verbs do none of the pipeline's work."""
_REFUSED = 2
"""Exit code of a run that was told something wrong and did nothing."""
_PRIVATE = "notify."
"""Values that may hold a password, and change no result."""


def next_number(logs: Path) -> int:
    """The lowest attempt number that no folder has."""
    folders = attempt_folders(logs)
    return int(folders[-1].name.rpartition("-")[2]) + 1 if folders else 1


def attempt_folders(logs: Path) -> list[Path]:
    """All attempts, oldest first."""
    return sorted(p for p in logs.glob("attempt-*") if p.is_dir()) if logs.is_dir() else []


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of an attempt, details beside ``at`` and ``event``; a torn line is left out."""
    with contextlib.suppress(OSError):
        return parse_events((folder / EVENTS_NAME).read_text(encoding="utf-8", errors="replace").splitlines())
    return []


def recent_events(folder: Path, max_bytes: int = 1 << 18) -> list[dict[str, Any]]:
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


def parse_events(lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """Lines of a log as events; what is no whole event is left out."""
    events: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            events.append({"at": str(record["at"]), "event": record["kind"], **record["detail"]})
    return events


@dataclass(frozen=True)
class Given:
    """What a run was given beside eyas.toml.

    Attributes:
        attempt: its folder's name.
        values: as ``dotted.key=value``.
    """

    attempt: str
    values: tuple[str, ...]

    @property
    def words(self) -> str:
        """As it is typed."""
        return " ".join(f"--set {shlex.quote(value)}" for value in self.values)


def given_to_last_run(logs: Path, before: int | None = None) -> Given | None:
    """What the newest run that was not refused was given; None when it came to its end, or was given nothing.

    Whoever goes on with a run that was killed means that run, not the one that eyas.toml alone describes.

    Args:
        before: only attempts with lower numbers.
    """
    for folder in reversed(attempt_folders(logs)):
        if before is not None and int(folder.name.rpartition("-")[2]) >= before:
            continue
        events = recent_events(folder)
        if not events or events[0].get("verb") in NO_RUN:
            continue
        end = events[-1] if events[-1]["event"] == "attempt ended" else {}
        if end.get("exit_code") == _REFUSED:
            continue
        values = tuple(str(value) for value in events[0].get("set", ()))
        return Given(folder.name, values) if values and end.get("outcome") != "done" else None
    return None


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
        given = [override for override in overrides if not override.startswith(_PRIVATE)]
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
