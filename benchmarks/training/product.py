"""A large square product, as a contestant: the machine's own matrix rate."""

from __future__ import annotations

import torch
from benchmarks.training.case import Case

SIZE, REPEATS = 2048, 4


class Contestant:
    version = torch.__version__
    shifted = False
    objective = "soft_ce"

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self._left, self._right = (
            torch.randn(SIZE, SIZE, generator=generator).to(case.torch_dtype()) for _ in range(2)
        )
        self._result = torch.empty_like(self._left)

    def step(self) -> list[float]:
        """The number of floating-point operations that were done."""
        for _ in range(REPEATS):
            torch.mm(self._left, self._right, out=self._result)
        return [float(2 * SIZE**3 * REPEATS)]
