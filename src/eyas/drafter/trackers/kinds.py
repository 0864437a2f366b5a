"""Trackers by name: whether their packages are there, and how they are opened. Loads none of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from eyas.base.errors import ConfigError
from eyas.drafter.trackers.interface import TrackedRun, Tracker

_MODULES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "mlflow": "mlflow"}
"""The package that each needs; its adapter is the module of this folder with ``_tracker`` behind the name."""


def require_trackers(names: Iterable[str]) -> None:
    """Refuse to begin when the package of a tracker is missing.

    Raises:
        ConfigError: with the command that installs it.
    """
    missing = [name for name in names if find_spec(_MODULES[name]) is None]
    if missing:
        extras = ",".join(missing)
        raise ConfigError(
            f"train.trackers names {', '.join(missing)}, and the package is not installed",
            where="eyas.toml, train.trackers",
            hint=f"pip install 'eyas[{extras}]', or take it out of train.trackers",
        )


def open_tracker(name: str, run: TrackedRun, resumed: str | None) -> Tracker:
    """Begin a run in a tracker, or go on with the one that ``resumed`` names there."""
    adapter = import_module(f"eyas.drafter.trackers.{name}_tracker")
    return cast(Tracker, adapter.open_run(run, resumed))
