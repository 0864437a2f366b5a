"""Where training stands: last step, checkpoint and validation."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.stages.project import Project
from eyas.stages.records import checkpoint_folders

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class TrainingStatus:
    """The newest numbers of training; None where there is none yet.

    ``loss`` is the weighted sum over draft steps of the last training step; ``validation_loss`` is of
    draft step 0. ``checkpoint_seconds`` is the age of the newest whole checkpoint.
    """

    step: int | None
    loss: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    checkpoint: str | None
    checkpoint_seconds: float | None
    validation_step: int | None
    validation_loss: float | None
    validation_top1: float | None
    validation_acceptance_length: float | None


def training_status(project: Project) -> TrainingStatus | None:
    """The newest numbers, from the end of the metrics; None before the first step."""
    layout = project.layout
    last = {str(row.get("kind")): row for row in _last_rows(layout.metrics)}
    folders = []
    with contextlib.suppress(OSError):
        folders = checkpoint_folders(layout.checkpoints)
    if not last and not folders:
        return None
    trained, validated = last.get("train", {}), last.get("validation", {})
    age = None
    with contextlib.suppress(OSError, IndexError):
        age = max(0.0, time.time() - folders[-1].stat().st_mtime)
    return TrainingStatus(
        step=_whole(trained.get("step")),
        loss=_number(trained.get("loss")),
        learning_rate=_number(trained.get("lr")),
        tokens_per_second=_number(trained.get("tokens_per_second")),
        checkpoint=folders[-1].name if folders else None,
        checkpoint_seconds=age,
        validation_step=_whole(validated.get("step")),
        validation_loss=_first(validated.get("loss")),
        validation_top1=_first(validated.get("top1")),
        validation_acceptance_length=_number(validated.get("walk_tau")),
    )


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Rows at the end of the metrics, oldest first; torn lines are left out."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in file.read().split(b"\n"):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _first(value: object) -> float | None:
    return _number(value[0]) if isinstance(value, list) and value else None
