"""Weights that several products of one forward pass share.

Each draft step multiplies with the same weights. Autograd would make a gradient of the size of the weight for
every step and add them up; here the steps leave their inputs and output gradients, and one product over all
rows makes the sum. That is less memory traffic, and in bfloat16 one rounding instead of one for each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.drafter.few_shapes import filled, joined


class SharedWeights:
    """The products of one forward pass, each weight brought to the pass's arithmetic once.

    Args:
        dtype: arithmetic of the products.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[int, _Shared] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """``layer(x)`` for a layer without a bias, ``x [n, in]``."""
        return self.product(layer.weight, x)

    def product(self, weight: Tensor, x: Tensor) -> Tensor:
        """``x weight^T``; the same weight object has to be given each time, and is kept until the end."""
        shared = self._known.get(id(weight))
        if shared is None:
            shared = self._known[id(weight)] = _Shared(weight, self._dtype)
        if self._last is None or self._last[0] is not x:  # several weights are given the same rows
            self._last = x, filled(x.detach())
        output: Tensor = _Product.apply(x, self._last[1], shared.narrow, shared.rows)  # type: ignore[no-untyped-call]
        return output


class _Shared:
    """A weight and what the products with it left behind for its gradient."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight  # holds it, so that no other object gets its id
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.narrow: Tensor = _Narrow.apply(weight, dtype, self.rows)  # type: ignore[no-untyped-call]


class _Narrow(torch.autograd.Function):
    """The weight in the pass's arithmetic; its gradient comes last, when every product left its rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.rows, ctx.dtype = rows, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.view_as(weight) if weight.dtype == dtype else weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        if not ctx.rows:
            return None, None, None
        outputs, inputs = (joined(parts) for parts in zip(*ctx.rows, strict=True))
        ctx.rows.clear()
        return (outputs.T @ inputs).to(ctx.dtype), None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows_of_x: Tensor, weight: Tensor, rows: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.rows, ctx.num_rows = rows, len(x)
        ctx.save_for_backward(rows_of_x, weight)
        return F.linear(rows_of_x, weight)[: len(x)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            ctx.rows.append((gradients[0], x[: ctx.num_rows]))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return (filled(gradients[0]) @ weight)[: ctx.num_rows], None, None, None
