"""Is data/stats.json there, and does it add up?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from eyas.base.seal import is_sealed
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class StatisticsFacts:
    """The statistics, or why they cannot be read; ``is_due``: prepare has ended."""

    is_due: bool
    why: str | None
    values: dict[str, Any] | None


def look(scene: Scene) -> StatisticsFacts:
    layout = scene.layout
    due = is_sealed(layout.prompts) or is_sealed(layout.samples)
    try:
        values = json.loads(layout.stats.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return StatisticsFacts(due, "it is gone", None)
    except (OSError, ValueError) as error:
        return StatisticsFacts(due, f"it cannot be read: {error}", None)
    if not isinstance(values, dict):
        return StatisticsFacts(due, "it is no JSON object", None)
    return StatisticsFacts(due, None, values)


def judge(scene: Scene, facts: StatisticsFacts) -> Line:
    if not facts.is_due:
        return Line("statistics", "skipped", "no data prepared yet")
    why, values = facts.why, facts.values or {}
    if why is None:
        dropped = sum(int(n) for n in values.get("dropped", {}).values())
        records, kept = values.get("records"), values.get("kept")
        if not isinstance(records, int) or not isinstance(kept, int):
            why = "it lacks its counts"
        elif kept + dropped != records:
            why = f"{kept} kept and {dropped} dropped are not {records} records"
    if why is not None:
        what = f"data/stats.json: {why}"
        return verdict("statistics", [Finding("statistics-damaged", "data/stats.json", "damage", what)], "")
    return Line("statistics", "ok", f"{values['kept']} of {values['records']} records kept; it adds up")


CHECK = Check("statistics", look, judge)
