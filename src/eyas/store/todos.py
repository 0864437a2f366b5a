"""Phases and their todos: in the ledger, and in the attempt's log, from which a lost ledger is rebuilt.

A phase (recovery, extraction, ...) opens and closes explicitly. Each change of a todo is an event: who, when,
in which attempt, with what evidence.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from eyas.base.clock import utc_now_text
from eyas.store.ledger import Ledger
from eyas.store.ledger_history import Event, Todo

PHASE_EVENT, TODO_EVENT = "phase", "todo"
OPEN_STATUSES = ("pending", "in_progress", "blocked")
_MANY = 1_000_000


class EventLog(Protocol):
    """Where events are written besides the ledger: an attempt's log."""

    def event(self, kind: str, **detail: object) -> None: ...


@dataclass(frozen=True)
class Change:
    """One change of a todo."""

    at: str
    attempt: int | None
    who: str
    status: str
    evidence: str


@dataclass
class Phase:
    """A part of the work that opens, has todos, and closes.

    Attributes:
        id: ``recovery-8``: opened in attempt 8.
        closed_at: None while it is open.
    """

    id: str
    name: str
    opened_at: str
    closed_at: str | None = None
    outcome: str | None = None
    todos: list[Todo] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.closed_at is None


def whoami(verb: str) -> str:
    """Who changes a todo: ``anna@box (eyas recover)``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()} (eyas {verb})"


def read_phases(ledger: Ledger) -> list[Phase]:
    """All phases with their todos, oldest first."""
    phases: dict[str, Phase] = {}
    for event in ledger.events(kind=PHASE_EVENT, limit=_MANY):
        id_ = str(event.detail.get("id"))
        if event.detail.get("status") == "open":
            phases.setdefault(id_, Phase(id_, id_.rpartition("-")[0], event.at))
        elif id_ in phases:
            phases[id_].closed_at = event.at
            phases[id_].outcome = str(event.detail.get("outcome"))
    ranks = {id_: number for number, id_ in enumerate(_order(ledger))}
    for todo in sorted(ledger.todos(), key=lambda todo: ranks.get(todo.id, _MANY)):
        phase = phases.get(todo.id.partition("/")[0])
        if phase is not None:
            phase.todos.append(todo)
    return list(phases.values())


def _order(ledger: Ledger) -> list[str]:
    """Ids of todos in the order in which they were first noted, which is that of the plan."""
    return list(dict.fromkeys(str(e.detail.get("id")) for e in ledger.events(kind=TODO_EVENT, limit=_MANY)))


def history(ledger: Ledger, id_: str) -> list[Change]:
    """All changes of a todo, oldest first."""
    return [
        Change(
            event.at,
            event.attempt,
            str(event.detail.get("who", "")),
            str(event.detail.get("status")),
            str(event.detail.get("evidence", "")),
        )
        for event in ledger.events(kind=TODO_EVENT, limit=_MANY)
        if event.detail.get("id") == id_
    ]


def as_todo_list(todos: Iterable[Todo]) -> dict[str, Any]:
    """The form in which todo tools exchange lists: one object with ``todos``."""
    return {
        "todos": [
            {
                "id": todo.id,
                "content": todo.content,
                "priority": todo.priority,
                "status": todo.status,
                "depends_on": list(todo.depends_on),
                "evidence": todo.evidence,
            }
            for todo in todos
        ]
    }


class TodoBook:
    """Writes phases and todos; works before there is a ledger, and catches up when there is one.

    Args:
        log: of the attempt that does the writing.
        who: as `whoami` gives it.
    """

    def __init__(self, log: EventLog, who: str, attempt: int | None, ledger: Ledger | None = None) -> None:
        self._log, self._who, self._attempt, self._ledger = log, who, attempt, ledger
        self._waiting: list[Event] = []

    def attach(self, ledger: Ledger) -> None:
        """Give the ledger that was missing; it gets what was noted meanwhile."""
        self._ledger = ledger
        known = {(e.at, str(e.detail.get("id"))) for e in ledger.events(kind=TODO_EVENT, limit=_MANY)}
        known |= {(e.at, str(e.detail.get("id"))) for e in ledger.events(kind=PHASE_EVENT, limit=_MANY)}
        waiting, self._waiting = self._waiting, []
        for event in waiting:  # a rebuild has read them from the log already
            if (event.at, str(event.detail.get("id"))) not in known:
                write_event(ledger, event)

    def detach(self) -> None:
        """Write to the log only, while the ledger is closed for its mending."""
        self._ledger = None

    def open_phase(self, name: str) -> str:
        """Open a phase, or go on with the open one of that name; returns its id."""
        phases = [] if self._ledger is None else [p for p in read_phases(self._ledger) if p.name == name]
        if phases and phases[-1].is_open:
            return phases[-1].id
        id_ = f"{name}-{self._attempt or 0}"
        self._write(PHASE_EVENT, {"id": id_, "status": "open"})
        return id_

    def close_phase(self, id_: str, outcome: str) -> None:
        """Close a phase; its outcome is a word or a sentence."""
        ids = [id_]
        if self._ledger is not None:  # one that was opened while the ledger was lost may lie behind it
            name = id_.rpartition("-")[0]
            ids = [
                p.id for p in read_phases(self._ledger) if p.name == name and p.is_open and p.id != id_
            ] + ids
        for each in ids:
            said = outcome if each == id_ else f"went on as {id_}"
            self._write(PHASE_EVENT, {"id": each, "status": "closed", "outcome": said})

    def put(self, todo: Todo) -> Todo:
        """Note a todo, new or changed; returns it with the time of the change."""
        changed = replace(todo, changed_at=utc_now_text())
        detail = {key: value for key, value in changed.__dict__.items() if key != "changed_at"}
        self._write(TODO_EVENT, detail | {"depends_on": list(changed.depends_on)})
        return changed

    def _write(self, kind: str, detail: dict[str, Any]) -> None:
        detail = detail | {"who": self._who}
        event = Event(utc_now_text(), self._attempt, kind, detail)
        self._log.event(kind, **detail)
        if self._ledger is None:
            self._waiting.append(event)
        else:
            write_event(self._ledger, event)


def write_event(ledger: Ledger, event: Event) -> None:
    """Note an event of a phase or todo, and the todo's new state, in one transaction."""
    with ledger.transaction() as connection:
        if event.kind == TODO_EVENT:
            restore_todo(ledger, event)
        ledger.insert_events(connection, [event])


def restore_todo(ledger: Ledger, event: Event) -> None:
    """Bring a todo to the state that an event tells of; one of an older form is left out."""
    detail = event.detail
    with suppress(KeyError, TypeError), ledger.transaction() as connection:
        row = (
            str(detail["id"]), str(detail["content"]), str(detail["priority"]), str(detail["status"]),
            json.dumps(list(detail["depends_on"])), str(detail["evidence"]), event.at,
        )  # fmt: skip
        connection.execute("INSERT OR REPLACE INTO todos VALUES (?, ?, ?, ?, ?, ?, ?)", row)
