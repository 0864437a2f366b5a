"""Which engines a store's states came from.

The engine is no part of the capture's recipe: states of two engines differ no more than those of one engine
in two batches, and a project may have to change its engine in the middle. What guards the change is
continuity: stored samples are captured again by the new source and compared before anything is added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from eyas.base.checked import require_check, with_check
from eyas.base.clock import utc_now_text
from eyas.base.files import write_json
from eyas.base.layout import Layout

_NAME = "captured_by.json"


def _read(path: Path) -> list[dict[str, object]]:
    try:
        return [
            dict(entry) for entry in require_check(json.loads(path.read_text(encoding="utf-8")))["sources"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # history for people: losing it changes no decision but one more comparison


def _path(layout: Layout) -> Path:
    return layout.store / _NAME


def source_changed(layout: Layout, source: Mapping[str, object]) -> bool:
    """Whether the last states came from another source than this one; a store without a note is local."""
    known = _read(_path(layout)) or [{"kind": "local"}]
    return {key: known[-1].get(key) for key in source} != dict(source)


def note_source(layout: Layout, source: Mapping[str, object], attempt: int) -> None:
    """Add a source to ``store/captured_by.json`` when it is not the last one. Raises OSError."""
    if source_changed(layout, source):
        entry = {**source, "attempt": attempt, "since": utc_now_text()}
        write_json(_path(layout), with_check({"sources": [*_read(_path(layout)), entry]}))
