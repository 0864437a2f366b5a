"""What a contestant is, and the optimizer that all share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from benchmarks.training.case import Case
from torch import Tensor


class Contestant(Protocol):
    """One training step of the case, again and again.

    Attributes:
        version: of the package, for the record.
        shifted: which rows it trains (`Case.rows`).
        objective: ``soft_ce`` or ``kl``: the same gradients, losses apart by the teacher's entropy.
    """

    version: str
    shifted: bool
    objective: str

    def __init__(self, case: Case) -> None: ...

    def step(self) -> list[float]:
        """Batch, forward, backward, clipping, optimizer.

        Returns:
            Sum of row losses at each draft step, before the weights moved.
        """


class Optimizer:
    """AdamW, fused, after clipping; the same for all, so that it decides nothing."""

    def __init__(self, case: Case, parameters: Iterable[Tensor]) -> None:
        self._clip = case.clip
        self._parameters = [p for p in parameters if p.requires_grad]
        self._adam = torch.optim.AdamW(self._parameters, case.lr, (0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)


def row_shares(case: Case, *, shifted: bool) -> list[float]:
    """Weight of one row of each step: gamma^j over the number of rows."""
    return [case.gamma**step / max(1, len(case.rows(step, shifted=shifted))) for step in range(case.steps)]
