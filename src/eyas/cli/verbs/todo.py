"""``eyas todo``: the list of what is to be done and was done, with its history."""

from __future__ import annotations

from eyas.base.layout import Layout
from eyas.cli.common import Common
from eyas.cli.hints import placed
from eyas.cli.main import PROJECT_VERBS
from eyas.cli.output import folded, next_command, note, print_json
from eyas.store.ledger import Ledger
from eyas.store.ledger_history import Todo
from eyas.store.todos import Phase, as_todo_list, history, read_phases

_MARKS = {"completed": "+", "in_progress": "~", "pending": ".", "blocked": "!", "cancelled": "-"}


def todo(
    *,
    all: bool = False,
    history: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Print the todos of the newest phase; --json gives one object with "todos", for todo tools.

    Args:
        all: those of all phases.
        history: show every change of each: who, when, in which attempt, with what evidence.
    """
    layout = common.open().layout
    phases, changes = [], {}
    if layout.ledger.exists():
        with Ledger.open_read_only(layout.ledger) as ledger:
            phases = read_phases(ledger)
            phases = phases if all else phases[-1:]
            if history:
                changes = {todo.id: _changes(ledger, todo.id) for phase in phases for todo in phase.todos}
    todos = [todo for phase in phases for todo in phase.todos]
    if common.json:
        print_json(as_todo_list(todos) | ({"history": changes} if history else {}))
        return 0
    for phase in phases:
        lines = (placed(line, common.suffix, PROJECT_VERBS) for line in render(phase, changes))
        print("\n".join(folded(line, 6) for line in lines))
    is_lost = not layout.ledger.exists() and any(layout.segments.glob("*.safetensors"))
    if is_lost:
        note("the ledger is gone, and the todos in it: recovery brings them back from the logs")
    elif not phases:
        note("no todos yet")
    is_left = is_lost or any(phase.is_open and phase.name == "recovery" for phase in phases)
    next_command(f"eyas recover{common.suffix}" if is_left else f"eyas status{common.suffix}")
    return 0


def recorded(layout: Layout) -> dict[str, object]:
    """The newest phase's todos as one object with ``todos``."""
    if not layout.ledger.exists():
        return as_todo_list([])
    with Ledger.open_read_only(layout.ledger) as ledger:
        phases = read_phases(ledger)[-1:]
    return as_todo_list(todo for phase in phases for todo in phase.todos)


def _changes(ledger: Ledger, id_: str) -> list[dict[str, object]]:
    return [change.__dict__ for change in history(ledger, id_)]


def render(phase: Phase, changes: dict[str, list[dict[str, object]]]) -> list[str]:
    """A phase for people."""
    state = "open" if phase.is_open else f"closed {phase.closed_at} ({phase.outcome})"
    lines = [f"{phase.id}  opened {phase.opened_at}, {state}"]
    for todo in phase.todos:
        lines += _lines(todo, phase)
        lines += [
            f"      {change['at']}  {change['status']}, attempt {change['attempt']}, {change['who']}"
            for change in changes.get(todo.id, [])
        ]
    return lines


def _lines(todo: Todo, phase: Phase) -> list[str]:
    name = todo.id.removeprefix(f"{phase.id}/")
    lines = [f"  {_MARKS[todo.status]} {todo.status:<11} {todo.content}  [{name}]"]
    return lines + ([f"      {todo.evidence}"] if todo.evidence else [])
