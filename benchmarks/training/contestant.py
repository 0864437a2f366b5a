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
    """AdamW, fused, on float32 weights, after clipping; the same for all, so that it decides nothing.

    Weights in a narrow type have float32 copies that the optimizer moves, as SpecForge's own optimizer does:
    a small step would be lost in the rounding of bfloat16.
    """

    def __init__(self, case: Case, parameters: Iterable[Tensor]) -> None:
        self._clip = case.clip
        self._parameters = [p for p in parameters if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        self._adam = torch.optim.AdamW(self._masters, case.lr, (0.9, 0.95), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        pairs = list(zip(self._parameters, self._masters, strict=True))
        for parameter, master in pairs:
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for parameter, master in pairs:
            if master is not parameter:
                parameter.copy_(master)


def row_shares(case: Case, *, shifted: bool) -> list[float]:
    """Weight of one row of each step: gamma^j over the number of rows."""
    return [case.gamma**step / max(1, len(case.rows(step, shifted=shifted))) for step in range(case.steps)]
