"""What training measured, thinned to what a picture can show."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class _Part:
    """A point and the seconds behind its share of waiting."""

    point: TrainPoint
    waited: float
    spent: float


@dataclass
class _Course:
    """The metrics of one project as far as they were read; ``parts`` keeps the means of whole stretches."""

    log: Growing
    rows: _Rows = field(default_factory=dict)
    parts: dict[tuple[int, int, int], _Part] = field(default_factory=dict)
    seen: int = -1
    view: TrainingView | None = None


_courses: dict[Path, _Course] = {}
_turn = Lock()


def training_view(project: Project) -> TrainingView | None:
    """The course of training; None before its first step. Only what was added is read and averaged."""
    path = project.layout.metrics
    with contextlib.suppress(OSError), _turn:
        course = _courses.setdefault(path, _Course(Growing(path)))
        lines, is_new = course.log.news()
        if is_new:
            course = _courses[path] = _Course(course.log)
        if _note(course.rows, lines):
            course.parts.clear()
        if course.seen != course.log.offset:
            course.seen, course.view = course.log.offset, _view(course)
        return course.view
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


def _note(rows: _Rows, lines: Sequence[bytes]) -> bool:
    """Add rows by kind and step, what is no whole row is left out; says whether one took another's place."""
    is_replaced = False
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            known, step = rows.setdefault(row["kind"], {}), int(row["step"])
            is_replaced = is_replaced or step in known
            known[step] = row
    return is_replaced


def _view(course: _Course) -> TrainingView | None:
    rows = course.rows
    trained = [row for _, row in sorted(rows.get("train", {}).items())]
    if not trained:
        return None
    saved = rows.get("checkpoint", {}).values()
    length = max(1, -(-len(trained) // MAX_POINTS))
    parts = []
    for start in range(0, len(trained), length):
        part = trained[start : start + length]
        key = (start, len(part), part[-1]["step"])
        if key not in course.parts:
            course.parts[key] = _part(part, trained[start - 1] if start else None)
        parts.append(course.parts[key])
    waited, spent = sum(part.waited for part in parts), sum(part.spent for part in parts)
    return TrainingView(
        num_steps=trained[-1]["step"],
        points=tuple(part.point for part in parts),
        validations=tuple(_validations(dict(sorted(rows.get("validation", {}).items())))),
        num_skipped=len(rows.get("skipped", {})),
        num_checkpoints=len(saved),
        checkpoint_seconds=sum(_float(row.get("seconds")) for row in saved),
        data_wait_share=waited / spent if spent else 0.0,
    )


def _part(rows: Sequence[dict[str, Any]], before: dict[str, Any] | None) -> _Part:
    """The means of a stretch of steps.

    Args:
        before: the row ahead of it, from which its first step counts its tokens.
    """
    waited = spent = 0.0
    last = None if before is None else _float(before.get("tokens"))
    for row in rows:
        rate, tokens = _float(row.get("tokens_per_second")), _float(row.get("tokens"))
        if last is not None and rate > 0 and tokens > last:
            seconds = (tokens - last) / rate
            spent += seconds
            waited += min(seconds, _float(row.get("data_wait_seconds")))
        last = tokens
    num_steps = max(len(row.get("step_loss") or ()) for row in rows)
    point = TrainPoint(
        step=rows[-1]["step"],
        at=str(rows[-1].get("at", "")),
        loss=_mean([row.get("loss") for row in rows]) or 0.0,
        step_loss=tuple(
            _mean([row["step_loss"][j] for row in rows if len(row.get("step_loss") or ()) > j])
            for j in range(num_steps)
        ),
        learning_rate=_mean([row.get("lr") for row in rows]) or 0.0,
        gradient_norm=_mean([row.get("grad_norm") for row in rows]) or 0.0,
        tokens_per_second=_mean([row.get("tokens_per_second") for row in rows]) or 0.0,
        data_wait_share=waited / spent if spent else 0.0,
    )
    return _Part(point, waited, spent)


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
