"""``eyas logs``: the events of an attempt."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from eyas.base.errors import UsageError
from eyas.base.units import format_count
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
    """One event for people."""
    at, kind = event.get("at", ""), event.get("event", "")
    if kind == "progress":
        text = (
            f"{event['stage']}: {event['label']} {format_count(event['done'])} of "
            f"{format_count(event['total'])} {event['unit']}, {event['rate']:.4g}/s"
        )
    elif kind == "message":
        text = f"{event['stage']}: {event['text']}"
    else:
        rest = {k: v for k, v in event.items() if k not in ("at", "event") and v is not None}
        text = f"{kind} " + " ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in rest.items())
    return f"{at}  {text}"
