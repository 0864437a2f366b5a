"""What training measured, thinned to what a picture can show."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from eyas.report.growing import Growing
from eyas.stages.project import Project

MAX_POINTS = 500

_Rows = dict[str, dict[int, dict[str, Any]]]
"""Rows by kind and step."""


@dataclass(frozen=True)
class TrainPoint:
    """Means over the training steps that end at ``step``; ``step_loss`` is per draft step."""

    step: int
    at: str
    loss: float
    step_loss: tuple[float | None, ...]
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    data_wait_share: float


@dataclass(frozen=True)
class ValidationPoint:
    """One validation; lists are per draft step.

    ``top1`` and ``conditional`` are as `eyas.drafter.metrics.ValidationTotals.summary` says, ``acceptance``
    the rate at which drafts would be accepted when sampling at temperature 1.
    """

    step: int
    at: str
    loss: tuple[float, ...]
    top1: tuple[float, ...]
    acceptance: tuple[float, ...]
    conditional: tuple[float, ...]
    acceptance_length: float


@dataclass(frozen=True)
class TrainingView:
    """The course of training; of a step that was done twice (after a kill) the later row counts."""

    num_steps: int
    points: tuple[TrainPoint, ...]
    validations: tuple[ValidationPoint, ...]
    num_skipped: int
    num_checkpoints: int
    checkpoint_seconds: float
    data_wait_share: float


_metrics: dict[Path, tuple[Growing, _Rows]] = {}
_views: dict[Path, tuple[int, TrainingView | None]] = {}
_turn = Lock()


def training_view(project: Project) -> TrainingView | None:
    """The course of training; None before its first step. Only what was added is read."""
    path = project.layout.metrics
    with contextlib.suppress(OSError), _turn:
        log, rows = _metrics.get(path) or (Growing(path), {})
        lines, is_new = log.news()
        if is_new:
            rows, _ = {}, _views.pop(path, None)
        _metrics[path] = (log, rows)
        _note(rows, lines)
        known = _views.get(path)
        if known is None or known[0] != log.offset:
            _views[path] = (log.offset, _view(rows))
        return _views[path][1]
    return None


def training_rows(path: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of one kind by step; of a step that was done twice the later row. Empty without a file."""
    with contextlib.suppress(OSError):
        return list(_by_step(path.read_bytes()).get(kind, {}).values())
    return []


def _by_step(content: bytes) -> _Rows:
    rows: _Rows = {}
    _note(rows, content.split(b"\n"))
    return {kind: dict(sorted(found.items())) for kind, found in rows.items()}


def _note(rows: _Rows, lines: Sequence[bytes]) -> None:
    """Add rows by kind and step; what is no whole row is left out."""
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows.setdefault(row["kind"], {})[int(row["step"])] = row


def _view(rows: _Rows) -> TrainingView | None:
    trained = [row for _, row in sorted(rows.get("train", {}).items())]
    if not trained:
        return None
    saved = rows.get("checkpoint", {}).values()
    return TrainingView(
        num_steps=trained[-1]["step"],
        points=tuple(_points(trained)),
        validations=tuple(_validations(dict(sorted(rows.get("validation", {}).items())))),
        num_skipped=len(rows.get("skipped", {})),
        num_checkpoints=len(saved),
        checkpoint_seconds=sum(_float(row.get("seconds")) for row in saved),
        data_wait_share=_wait_share(trained),
    )


def _points(rows: Sequence[dict[str, Any]]) -> list[TrainPoint]:
    length = max(1, -(-len(rows) // MAX_POINTS))
    points = []
    for start in range(0, len(rows), length):
        part = rows[start : start + length]
        num_steps = max(len(row.get("step_loss") or ()) for row in part)
        points.append(
            TrainPoint(
                step=part[-1]["step"],
                at=str(part[-1].get("at", "")),
                loss=_mean([row.get("loss") for row in part]) or 0.0,
                step_loss=tuple(
                    _mean([row["step_loss"][j] for row in part if len(row.get("step_loss") or ()) > j])
                    for j in range(num_steps)
                ),
                learning_rate=_mean([row.get("lr") for row in part]) or 0.0,
                gradient_norm=_mean([row.get("grad_norm") for row in part]) or 0.0,
                tokens_per_second=_mean([row.get("tokens_per_second") for row in part]) or 0.0,
                data_wait_share=_wait_share(part),
            )
        )
    return points


def _wait_share(rows: Sequence[dict[str, Any]]) -> float:
    """Share of the time in which training waited for its next batch."""
    waited = total = 0.0
    before: int | None = None
    for row in rows:
        rate, tokens = _float(row.get("tokens_per_second")), int(row.get("tokens") or 0)
        if before is not None and rate > 0 and tokens > before:
            waited += _float(row.get("data_wait_seconds"))
            total += (tokens - before) / rate
        before = tokens
    return min(1.0, waited / total) if total else 0.0


def _validations(rows: dict[int, dict[str, Any]]) -> list[ValidationPoint]:
    found = []
    for step, row in rows.items():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            lists = {
                key: tuple(float(x) for x in row[key])
                for key in ("loss", "top1", "acceptance", "conditional")
            }
            found.append(
                ValidationPoint(step, str(row["at"]), **lists, acceptance_length=float(row["walk_tau"]))
            )
    return found


def _mean(values: Sequence[object]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
