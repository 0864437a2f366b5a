"""Weights & Biases. Offline unless ``WANDB_MODE`` says otherwise: ``wandb sync`` sends it when wanted."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from eyas.drafter.trackers.interface import TrackedRun


class _Wandb:
    def __init__(self, run: TrackedRun, resumed: str | None) -> None:
        self.run = resumed or uuid.uuid4().hex[:12]
        place = run.folder / "wandb"
        place.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=run.project,
            id=self.run,
            resume="allow",
            dir=str(place),
            config=dict(run.settings),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        # a step of its own: rows may come later than newer ones of another kind
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({**values, "step": step})

    def flush(self) -> None:
        """Its own process writes by itself."""

    def close(self) -> None:
        self._run.finish()


def open_run(run: TrackedRun, resumed: str | None) -> _Wandb:
    """A run of the same id at every sitting."""
    return _Wandb(run, resumed)
