"""What a tracker is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that trackers are told about.

    Attributes:
        project: name that groups runs.
        folder: where a tracker that keeps files may keep them.
        settings: of the training, flat, for the tracker's own table.
    """

    project: str
    folder: Path
    settings: Mapping[str, object]


class Tracker(Protocol):
    """One run in one tracker.

    Attributes:
        run: what names it there; opening again with it goes on with the same run.
    """

    run: str

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Numbers of one step by name; ``at`` is seconds since 1970. Steps of one name only rise."""

    def flush(self) -> None:
        """Make what was logged durable, as far as the tracker can."""

    def close(self) -> None:
        """End this sitting, not the run."""
