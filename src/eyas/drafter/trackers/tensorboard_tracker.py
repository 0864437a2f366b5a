"""TensorBoard: event files in a folder of the project."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from eyas.drafter.trackers.interface import TrackedRun


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        self.run = str(run.folder / "tensorboard")
        # each sitting writes a file of its own; all files of the folder are one run there
        self._writer = SummaryWriter(self.run)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_run(run: TrackedRun, resumed: str | None) -> _TensorBoard:
    """Event files below ``tensorboard/``: ``tensorboard --logdir FOLDER``."""
    return _TensorBoard(run)
