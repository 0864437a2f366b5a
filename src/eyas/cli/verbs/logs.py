"""``eyas logs``: the events of an attempt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.base.errors import UsageError
from eyas.base.units import format_amount, format_bytes, format_count, format_numbers, format_rate
from eyas.cli.common import Common
from eyas.cli.output import next_command, note
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.pipeline.lock import current_holder


def logs(
    *,
    attempt: int | None = None,
    follow: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Print the events of an attempt, oldest first.

    Args:
        attempt: number of the attempt; the newest when left out.
        follow: go on as events come, until the run ends.
    """
    layout = common.open().layout
    folder = _folder(layout.logs, attempt)
    if folder is None:
        note("no attempt yet")
        next_command(f"eyas run{common.suffix}")
        return 0
    shown = 0
    while True:
        events = read_events(folder)
        for event in events[shown:]:
            sys.stdout.write((json.dumps(event, ensure_ascii=False) if common.json else line(event)) + "\n")
        sys.stdout.flush()
        shown = len(events)
        ended = bool(events) and events[-1].get("event") == "attempt ended"
        if not follow or ended or current_holder(layout.state) is None:
            return 0
        time.sleep(0.5)


def _folder(logs_folder: Path, attempt: int | None) -> Path | None:
    folders = attempt_folders(logs_folder)
    if attempt is None:
        return folders[-1] if folders else None
    wanted = logs_folder / f"attempt-{attempt:04d}"
    if wanted not in folders:
        raise UsageError(
            f"there is no attempt {attempt}", hint=f"attempts: {len(folders)}; leave the number out"
        )
    return wanted


def line(event: dict[str, Any]) -> str:
    """One event for people; ``--json`` has all of it."""
    kind = str(event.get("event", ""))
    say = _SAID.get(kind, _anything)
    try:
        text = say(event)
    except (KeyError, TypeError, ValueError, AttributeError):  # written by another version
        text = _anything(event)
    return f"{event.get('at', '')}  {text}"


def _progress(event: dict[str, Any]) -> str:
    done = format_bytes(event["done"]) if event["unit"] == "bytes" else format_count(event["done"])
    count = f"{event['stage']}: {event['label']} {done} of {format_amount(event['total'], event['unit'])}"
    return f"{count}, {format_rate(event['rate'], event['unit'])}" if event["rate"] else count


def _attempt_ended(event: dict[str, Any]) -> str:
    why = "".join(f"; {event[key]}" for key in ("what", "hint") if event.get(key))
    return f"attempt ended: {event['outcome']}{why}"


def _stage_ended(event: dict[str, Any]) -> str:
    return f"{event['stage']} ended: {format_numbers(event['numbers']) or 'done'}"


def _todo(event: dict[str, Any]) -> str:
    evidence = f": {event['evidence']}" if event.get("evidence") else ""
    return f"todo {event['id']} {event['status'].replace('_', ' ')}: {event['content']}{evidence}"


def _phase(event: dict[str, Any]) -> str:
    outcome = f": {event['outcome']}" if event.get("outcome") else ""
    return f"phase {event['id']} {event['status']}{outcome}"


def _anything(event: dict[str, Any]) -> str:
    rest = {k: v for k, v in event.items() if k not in ("at", "event") and v is not None}
    words = (f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in rest.items())
    return " ".join([str(event.get("event", "")), *words])


_SAID: dict[str, Callable[[dict[str, Any]], str]] = {
    "progress": _progress,
    "message": lambda event: f"{event['stage']}: {event['text']}",
    "attempt started": lambda event: f"attempt started: eyas {event['verb']}, process {event['pid']}",
    "attempt ended": _attempt_ended,
    "stage started": lambda event: f"{event['stage']} started ({event['action']}): {event['why']}",
    "stage ended": _stage_ended,
    "todo": _todo,
    "phase": _phase,
}
