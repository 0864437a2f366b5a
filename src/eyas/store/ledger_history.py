"""The ledger's memory of runs: attempts, stages, events and todos."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.clock import utc_now_text
from eyas.base.files import appending
from eyas.store.ledger_file import LedgerFile


@dataclass(frozen=True)
class StageRecord:
    """What the ledger knows of a stage.

    Args:
        recipe_hash: hash of ``recipe``, all that determines the stage's output.
        state: ``running``, ``done`` or another word of the stage's own.
        started_at, finished_at: times in UTC; None before.
        detail: counts and facts for reports.
    """

    name: str
    recipe_hash: str
    recipe: dict[str, Any]
    state: str
    started_at: str | None
    finished_at: str | None
    detail: dict[str, Any]


@dataclass(frozen=True)
class AttemptRecord:
    """One start of the pipeline; ``ended_at`` is None while it runs, or when it was killed."""

    number: int
    started_at: str
    ended_at: str | None
    outcome: str | None
    detail: dict[str, Any]


@dataclass(frozen=True)
class Event:
    """Something that happened, in the order it was noted."""

    at: str
    attempt: int | None
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Todo:
    """One step of a recovery plan, in the shape that plans are exchanged in."""

    id: str
    content: str
    priority: str
    status: str
    depends_on: tuple[str, ...]
    evidence: str
    changed_at: str


class LedgerHistory(LedgerFile):
    """Attempts, stages, events and todos."""

    mirror: Path | None = None
    """An ``events.jsonl`` that gets a copy of every event, from which a lost ledger is rebuilt."""

    def start_attempt(self, detail: Mapping[str, Any] | None = None, *, at_least: int = 1) -> int:
        """Note that an attempt begins and give its number.

        Args:
            detail: pid, host, boot, command: whatever names the process.
            at_least: the lowest number to use, when log folders hold higher ones than the ledger.
        """
        with self.transaction() as connection:
            highest = connection.execute("SELECT coalesce(max(number), 0) FROM attempts").fetchone()[0]
            number = max(int(highest) + 1, at_least)
            connection.execute(
                "INSERT INTO attempts VALUES (?, ?, NULL, NULL, ?)",
                (number, utc_now_text(), _to_json(detail or {})),
            )
        return number

    def restore_attempt(self, number: int, started_at: str) -> None:
        """Note an attempt of which only its log folder is left; one that is known stays as it is."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO attempts VALUES (?, ?, NULL, 'unknown', '{}')", (number, started_at)
            )

    def end_attempt(self, number: int, outcome: str) -> None:
        """Note how an attempt ended: ``done``, ``stopped``, or an error's code."""
        with self.transaction() as connection:
            connection.execute(
                "UPDATE attempts SET ended_at = ?, outcome = ? WHERE number = ?",
                (utc_now_text(), outcome, number),
            )

    def attempts(self) -> list[AttemptRecord]:
        """All attempts, oldest first."""
        with self.reading() as connection:
            rows = connection.execute("SELECT * FROM attempts ORDER BY number").fetchall()
        return [AttemptRecord(row[0], row[1], row[2], row[3], json.loads(row[4])) for row in rows]

    def record_stage(
        self,
        name: str,
        *,
        recipe_hash: str,
        recipe: Mapping[str, Any],
        state: str,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Note a stage's state; ``done`` sets the time it finished, a changed recipe starts it anew."""
        now = utc_now_text()
        with self.transaction() as connection:
            old = self.stage_record(name)
            same = old is not None and old.recipe_hash == recipe_hash
            started_at = old.started_at if old is not None and same else now
            connection.execute(
                "INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    name,
                    recipe_hash,
                    _to_json(recipe),
                    state,
                    started_at,
                    now if state == "done" else None,
                    _to_json(detail or {}),
                ),
            )

    def stage_record(self, name: str) -> StageRecord | None:
        """What is known of a stage; None when it never started."""
        with self.reading() as connection:
            row = connection.execute("SELECT * FROM stages WHERE name = ?", (name,)).fetchone()
        return None if row is None else _stage(row)

    def stages(self) -> dict[str, StageRecord]:
        """All stages that ever started, by name."""
        with self.reading() as connection:
            rows = connection.execute("SELECT * FROM stages ORDER BY name").fetchall()
        return {row[0]: _stage(row) for row in rows}

    def forget_stage(self, name: str) -> None:
        """Drop a stage's record, so that it counts as never started."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM stages WHERE name = ?", (name,))

    def event(self, kind: str, detail: Mapping[str, Any] | None = None, attempt: int | None = None) -> None:
        """Note that something happened, here and in the mirror."""
        event = Event(utc_now_text(), attempt, kind, dict(detail or {}))
        with self.transaction() as connection:
            self.insert_events(connection, [event])
        if self.mirror is not None:
            # The event is in the ledger: a full disk must not end a run over the second copy.
            with suppress(OSError), appending(self.mirror) as file:
                file.write(_to_json(event.__dict__) + "\n")

    @staticmethod
    def insert_events(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
        """Insert events with their own times, inside the caller's transaction; the mirror gets no copy."""
        connection.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?)",
            [(event.at, event.attempt, event.kind, _to_json(event.detail)) for event in events],
        )

    def events(self, *, kind: str | None = None, limit: int = 1000) -> list[Event]:
        """The newest events, oldest of them first.

        Args:
            kind: only events of this kind.
            limit: at most so many.
        """
        where = "" if kind is None else "WHERE kind = :kind"
        with self.reading() as connection:
            rows = connection.execute(
                f"SELECT at, attempt, kind, detail FROM events {where} ORDER BY rowid DESC LIMIT :limit",
                {"kind": kind, "limit": limit},
            ).fetchall()
        return [Event(row[0], row[1], row[2], json.loads(row[3])) for row in reversed(rows)]

    def record_todo(self, todo: Todo) -> None:
        """Write a todo, or its new status; each change is also an event, which is its history."""
        fields = todo.__dict__ | {"depends_on": _to_json(todo.depends_on)}
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO todos VALUES"
                " (:id, :content, :priority, :status, :depends_on, :evidence, :changed_at)",
                fields,
            )
            self.event("todo", {"id": todo.id, "status": todo.status, "evidence": todo.evidence})

    def todos(self) -> list[Todo]:
        """All todos by id."""
        with self.reading() as connection:
            rows = connection.execute("SELECT * FROM todos ORDER BY id").fetchall()
        return [
            Todo(row[0], row[1], row[2], row[3], tuple(json.loads(row[4])), row[5], row[6]) for row in rows
        ]


def _stage(row: tuple[Any, ...]) -> StageRecord:
    name, recipe_hash, recipe, state, started_at, finished_at, detail = row
    return StageRecord(
        name, recipe_hash, json.loads(recipe), state, started_at, finished_at, json.loads(detail)
    )


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
