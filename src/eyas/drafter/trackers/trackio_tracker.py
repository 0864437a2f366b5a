"""trackio: a local database, looked at with ``trackio show``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import trackio

from eyas.drafter.trackers.interface import TrackedRun


class _Trackio:
    def __init__(self, run: TrackedRun, resumed: str | None) -> None:
        self.run = resumed or f"{run.project}-{uuid.uuid4().hex[:8]}"
        self._run: Any = trackio.init(
            project=run.project,
            name=self.run,
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Its own thread writes by itself."""

    def close(self) -> None:
        self._run.finish()


def open_run(run: TrackedRun, resumed: str | None) -> _Trackio:
    """A run of the same name at every sitting."""
    return _Trackio(run, resumed)
