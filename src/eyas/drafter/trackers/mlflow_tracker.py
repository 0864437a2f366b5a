"""MLflow: the server that ``MLFLOW_TRACKING_URI`` names, or else a database in the project's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from eyas.drafter.trackers.interface import TrackedRun

_BATCH = 500
"""Parameters in one request; the service takes no more."""


class _Mlflow:
    def __init__(self, run: TrackedRun, resumed: str | None) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        place = os.environ.get("MLFLOW_TRACKING_URI") or local_place(run)
        self._client = MlflowClient(tracking_uri=place)
        self.run = resumed or self._begin(run)

    def _begin(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        name: str = self._client.create_run(identity).info.run_id
        settings = [Param(key, str(value)) for key, value in run.settings.items()]
        for start in range(0, len(settings), _BATCH):
            self._client.log_batch(name, params=settings[start : start + _BATCH])
        return name

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        milliseconds = int(at * 1000)
        metrics = [Metric(name, value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def flush(self) -> None:
        """Each request is kept when it returns."""

    def close(self) -> None:
        self._client.set_terminated(self.run)


def local_place(run: TrackedRun) -> str:
    """The tracking URI of a project's own database: ``mlflow ui --backend-store-uri URI``."""
    return f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"


def open_run(run: TrackedRun, resumed: str | None) -> _Mlflow:
    """The same run at every sitting."""
    return _Mlflow(run, resumed)
