"""Samples packed side by side into one batch, with document boundaries.

Shape letters in this package: R rows of all samples in a batch, N rows supervised at step 0,
A aux states, T target width, H drafter width, D head width, G key-value heads, V target vocabulary,
K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.base.errors import DataError
from eyas.drafter.kernels.compiled import copy_rows
from eyas.drafter.rows import Spans, supervised_rows


@dataclass(frozen=True)
class TrainingSample:
    """One captured sample.

    Attributes:
        tokens: integer ``[L]``.
        spans: half-open token ranges that the assistant wrote.
        aux: ``[L, A, T]``.
        last: ``[rows, T]`` post-norm last states of ``last_rows``.
        last_rows: int64 ``[rows]``, ascending.
    """

    id: str
    tokens: npt.NDArray[np.integer]
    spans: Spans
    aux: Tensor
    last: Tensor
    last_rows: npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedBatch:
    """What one forward pass needs, and nothing else.

    Rows behind a sample's last supervised row touch no loss and are left out. Rows of all samples are
    numbered through. "Order of step 0" below means: the N rows supervised at step 0, ascending. A row
    supervised at step j with place p in that order has its token ``x[t+1+j]`` and its teacher row
    ``h[t+1+j]`` at place p + j, because the rows between are supervised at step 0 too.

    Attributes:
        aux: ``[R, A, T]``.
        next_tokens: ``[R]``, ``x[t+1]``.
        positions: ``[R]``, t within its sample.
        query_rows: ``[N]`` row numbers supervised at step 0, in host memory.
        query_rows_on_device: the same on the device.
        kept: for each step j, ``[n_j]`` places in the order of step 0, in host memory.
        kept_on_device: the same on the device.
        teacher: ``[N, T]`` last states ``h[t+1]``.
        targets: ``[N]`` tokens ``x[t+2]``.
        row_bounds: first row of each sample, and R at the end.
        query_bounds: the same for the order of step 0.
        ids: of the samples that have supervised rows, in order.
        num_tokens: tokens of the whole samples, rows left out included.
    """

    aux: Tensor
    next_tokens: Tensor
    positions: Tensor
    query_rows: npt.NDArray[np.int64]
    query_rows_on_device: Tensor
    kept: list[npt.NDArray[np.int64]]
    kept_on_device: list[Tensor]
    teacher: Tensor
    targets: Tensor
    row_bounds: list[int]
    query_bounds: list[int]
    ids: list[str]
    num_tokens: int

    @property
    def num_supervised(self) -> list[int]:
        """Supervised rows of each step."""
        return [len(rows) for rows in self.kept]


def pack(
    samples: Sequence[TrainingSample], *, device: torch.device, dtype: torch.dtype, steps: int
) -> PackedBatch | None:
    """Pack samples; None when no row of any of them is supervised.

    Raises:
        DataError: a sample lacks a last state that its spans call for.
    """
    stored: list[tuple[TrainingSample, npt.NDArray[np.int64]]] = []
    next_tokens, positions, targets = [], [], []
    query_rows: list[npt.NDArray[np.int64]] = []
    parts_of_step: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(steps)]
    row_bounds, query_bounds = [0], [0]
    ids = []
    for sample in samples:
        length = len(sample.tokens)
        first = supervised_rows(sample.spans, length, 0)
        if len(first) == 0:
            continue
        num_rows = int(first[-1]) + 1
        ids.append(sample.id)
        tokens = np.asarray(sample.tokens, dtype=np.int64)
        stored.append((sample, first))
        next_tokens.append(tokens[1 : num_rows + 1])
        positions.append(np.arange(num_rows))
        targets.append(tokens[first + 2])
        query_rows.append(first + row_bounds[-1])
        for step in range(steps):
            rows = supervised_rows(sample.spans, length, step)
            parts_of_step[step].append(np.searchsorted(first, rows) + query_bounds[-1])
        row_bounds.append(row_bounds[-1] + num_rows)
        query_bounds.append(query_bounds[-1] + len(first))
    if not stored:
        return None

    def on_device(parts: list[npt.NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    aux = torch.empty((row_bounds[-1], *stored[0][0].aux.shape[1:]), device=device, dtype=dtype)
    teacher = torch.empty((query_bounds[-1], stored[0][0].last.shape[1]), device=device, dtype=dtype)
    for i, (sample, first) in enumerate(stored):
        start, end = row_bounds[i : i + 2]
        copy_rows(aux[start:end].flatten(1), sample.aux[: end - start].flatten(1))
        _copy_teacher_rows(teacher[query_bounds[i] : query_bounds[i + 1]], sample, first)
    kept = [np.concatenate(parts) for parts in parts_of_step]
    return PackedBatch(
        aux=aux,
        next_tokens=on_device(next_tokens),
        positions=on_device(positions),
        query_rows=np.concatenate(query_rows),
        query_rows_on_device=on_device(query_rows),
        kept=kept,
        kept_on_device=[torch.from_numpy(places).to(device) for places in kept],
        teacher=teacher,
        targets=on_device(targets),
        row_bounds=row_bounds,
        query_bounds=query_bounds,
        ids=ids,
        num_tokens=sum(len(sample.tokens) for sample in samples),
    )


def _copy_teacher_rows(place: Tensor, sample: TrainingSample, first: npt.NDArray[np.int64]) -> None:
    places = np.searchsorted(sample.last_rows, first + 1)
    found = places < len(sample.last_rows)
    if not found.all() or (sample.last_rows[places] != first + 1).any():
        raise DataError(
            "a captured sample lacks last states that its spans call for",
            where=f"sample {sample.id}",
            hint="eyas verify --deep",
        )
    if len(sample.last) != len(sample.last_rows):
        raise DataError(
            "a captured sample's last states and their rows differ in number", where=f"sample {sample.id}"
        )
    # rows of one answer lie side by side
    edges = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    for start, end in pairwise(edges):
        copy_rows(place[start:end], sample.last[places[start] : places[end - 1] + 1])
