"""From rows of the metrics file to numbers with names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

_NOT_NUMBERS = ("kind", "step", "at")


def row_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a row, lists and tables opened: ``{"train/loss": 3.1, "train/step_loss/0": 3.0}``."""
    kind = str(row["kind"])
    parts = ((key, value) for key, value in row.items() if key not in _NOT_NUMBERS)
    return {name: number for key, value in parts for name, number in _numbers(f"{kind}/{key}", value)}


def row_time(row: Mapping[str, Any]) -> float:
    """When a row was written, in seconds since 1970."""
    return datetime.fromisoformat(str(row["at"])).timestamp()


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{name}/{key}", part)
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from _numbers(f"{name}/{place}", part)
    elif isinstance(value, (int, float)) and math.isfinite(value):
        yield name, float(value)
