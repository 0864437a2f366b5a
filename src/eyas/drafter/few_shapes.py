"""Matrix products of few different shapes.

For bfloat16 on a CPU the library behind torch makes a kernel for each shape that it meets and keeps it: 4 to
28 ms, often several times the product itself, and some megabytes. Batches hardly ever have the same number
of rows, so rows are filled up with zeros to numbers that come again. Elsewhere nothing is filled up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 16
"""Least step between numbers of rows; also rows of a tile of the processor's matrix units."""


def common_rows(n: int) -> int:
    """The next number from ``n`` on that batches share: 16 of them between a power of two and the next."""
    unit = max(UNIT, 1 << max(0, (n - 1).bit_length() - 5))
    return -(-n // unit) * unit


def missing(x: Tensor, rows: int) -> int:
    """Rows that a product with ``rows`` of ``x`` is to be given more; 0 where its shape does not matter."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return 0
    return common_rows(rows) - rows


def filled(x: Tensor, *, like: Tensor | None = None, to: int | None = None) -> Tensor:
    """``x [n, ...]`` with rows of zeros behind it: as many as ``like`` is missing, or up to ``to`` rows."""
    more = missing(x if like is None else like, len(x)) if to is None else to - len(x)
    return torch.cat((x, x.new_zeros(more, *x.shape[1:]))) if more else x


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``[n_i, ...]`` one behind the other, and rows of zeros behind them."""
    more = missing(parts[0], sum(len(part) for part in parts))
    return torch.cat([*parts, parts[0].new_zeros(more, *parts[0].shape[1:])] if more else [*parts])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x weight^T``; ``x [n, c]`` is filled up for it, with more dimensions it is taken as it is."""
    return F.linear(filled(x), weight)[: len(x)] if x.ndim == 2 else F.linear(x, weight)
