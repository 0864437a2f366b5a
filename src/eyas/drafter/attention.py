"""Attention of a draft step: all earlier rows at step 0, and the row itself at later steps.

Row t at step j attends, in one softmax, to the step-0 keys of rows <= t of its sample and to its own
keys of steps 1..j. Scores are made block by block of queries and made again for the gradient, so that
no more than one block of them is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_SCORES = 1 << 23
"""Most scores held at a time (heads times queries times keys)."""
BLOCK_QUERIES = 128
"""Most queries in a block: keys behind a block's last query are skipped, so short blocks save work."""

_LEAST_EXPONENT = {dtype: math.log(torch.finfo(dtype).tiny) + 1 for dtype in (torch.float32, torch.float64)}
"""Where the exponential is still a normal number."""

Block = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class AttentionPlan:
    """Which queries meet which keys.

    Attributes:
        query_rows: ``[n]`` row number of each query, ascending; a query sees the rows of its sample up
            to its own.
        blocks: (first query, last query + 1, first key row, last key row + 1, first row that not all of the
            queries see), each within one sample.
    """

    query_rows: Tensor
    blocks: list[Block]


def plan_attention(
    rows: npt.NDArray[np.int64], row_bounds: list[int], num_heads: int, device: torch.device
) -> AttentionPlan:
    """Cut the queries of ``rows`` into blocks within samples and within the memory that scores may take."""
    edges = np.searchsorted(rows, np.asarray(row_bounds))
    blocks = []
    for sample, first_key in enumerate(row_bounds[:-1]):
        start, end = int(edges[sample]), int(edges[sample + 1])
        while start < end:
            longest = row_bounds[sample + 1] - first_key
            size = max(1, min(BLOCK_QUERIES, BLOCK_SCORES // (num_heads * longest)))
            stop = min(start + size, end)
            blocks.append((start, stop, first_key, int(rows[stop - 1]) + 1, int(rows[start]) + 1))
            start = stop
    return AttentionPlan(torch.from_numpy(rows).to(device), blocks)


def step_attention(
    query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, plan: AttentionPlan
) -> Tensor:
    """Attention output ``[n, heads, D]``.

    Args:
        query: ``[n, heads, D]``, turned to its position.
        key, value: ``[R, G, D]`` of step 0.
        own_key, own_value: ``[j, n, G, D]`` of steps 1..j for the queries' own rows.
    """
    output: Tensor = _StepAttention.apply(query, key, value, own_key, own_value, plan)  # type: ignore[no-untyped-call]
    return output


class _Grouped:
    """Queries by the key-value head they share, ``[G, n, group, D]``, and all blocks of their scores.

    In this layout the queries of a block lie side by side, so that products take them without a copy.
    """

    def __init__(self, query: Tensor, key: Tensor, own_key: Tensor, plan: AttentionPlan) -> None:
        self.num_groups = key.shape[1]
        self.scale = query.shape[-1] ** -0.5
        self.wide = query.dtype if query.dtype in (torch.float32, torch.float64) else torch.float32
        self.query = self.gather(query) * self.scale
        self.key = key.transpose(0, 1)
        self.own_key = self.gather_own(own_key)
        self._plan = plan

    def gather(self, x: Tensor) -> Tensor:
        """``[n, heads, D]`` as ``[G, n, group, D]``, side by side in memory."""
        n, heads, width = x.shape
        parts = x.reshape(n, self.num_groups, heads // self.num_groups, width)
        return parts.transpose(0, 1).contiguous()

    def gather_own(self, x: Tensor) -> Tensor:
        """``[j, n, G, D]`` as ``[j, G, n, 1, D]``."""
        return x.transpose(1, 2).unsqueeze(3)

    def scatter(self, x: Tensor) -> Tensor:
        """The way back of `gather`."""
        return x.transpose(0, 1).flatten(1, 2)

    def own_products(self, x: Tensor, own: Tensor) -> Tensor:
        """Products of ``x [G, n, group, D]`` with the row's own ``[j, G, n, 1, D]``: ``[j, G, n, group]``."""
        products = [torch.mul(x, part).sum(dim=-1, dtype=self.wide) for part in own]
        return torch.stack(products) if products else x.new_empty((0, *x.shape[:-1]), dtype=self.wide)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor, _Unseen]]:
        """Queries, keys, and scores ``[G, n, group, r]`` of each block, those of unseen keys lowered."""
        for first, last, key, end, behind in self._plan.blocks:
            queries, keys = slice(first, last), slice(key, end)
            rows = torch.arange(behind, end, device=self.query.device)
            seen = (rows <= self._plan.query_rows[queries].unsqueeze(1)).to(self.wide)
            unseen = _Unseen(seen.unsqueeze(1), behind - key)
            scores = torch.bmm(self.query[:, queries].flatten(1, 2), self.key[:, keys].transpose(1, 2))
            scores = scores.to(self.wide).view(self.num_groups, last - first, -1, end - key)
            unseen.lower(scores)
            yield queries, keys, scores, unseen


class _Unseen:
    """Keys of a block that some of its queries do not see: those behind the first query's row.

    ``seen`` is ``[n, 1, r']``, one or zero, for the last r' keys.
    """

    def __init__(self, seen: Tensor, start: int) -> None:
        self._seen, self._start = seen, start

    def lower(self, scores: Tensor) -> None:
        """Take unseen scores below all others."""
        scores[..., self._start :].add_((self._seen - 1) * (torch.finfo(scores.dtype).max / 4))

    def exponentials(self, scores: Tensor, peak: Tensor) -> Tensor:
        """In place, exp(scores - peak), exactly zero where a key is not seen.

        The exponential of a number that underflows takes ten to twenty times as long as another on a CPU,
        so unseen scores are lifted before it and removed after it.
        """
        scores.sub_(peak)
        behind = scores[..., self._start :]
        behind.clamp_(min=_LEAST_EXPONENT[scores.dtype])
        scores.exp_()
        behind.mul_(self._seen)
        return scores


class _StepAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, own_key, own_value, plan = arguments
        of = _Grouped(query, key, own_key, plan)
        value_of = value.transpose(0, 1)
        own = of.own_products(of.query, of.own_key)
        output = torch.empty_like(of.query)
        peaks = of.query.new_empty(of.query.shape[:-1], dtype=of.wide)
        totals = torch.empty_like(peaks)
        for queries, keys, scores, unseen in of.blocks():
            peak = scores.amax(dim=-1)
            for later in own:
                peak = torch.maximum(peak, later[:, queries])
            weights = unseen.exponentials(scores, peak.unsqueeze(-1))
            peaks[:, queries], totals[:, queries] = peak, weights.sum(dim=-1)
            part = torch.bmm(weights.to(query.dtype).flatten(1, 2), value_of[:, keys])
            output[:, queries] = part.view(output[:, queries].shape)
        own = own.sub_(peaks).exp_()
        for weight, later in zip(own, of.gather_own(own_value), strict=True):
            output.addcmul_(weight.unsqueeze(-1).to(query.dtype), later)
            totals += weight
        output = (output / totals.unsqueeze(-1)).to(query.dtype)
        ctx.plan = plan
        result = of.scatter(output)
        ctx.save_for_backward(query, key, value, own_key, own_value, result, totals.log_().add_(peaks))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, output, normaliser = ctx.saved_tensors
        of = _Grouped(query, key, own_key, ctx.plan)
        value_of, own_value_of = value.transpose(0, 1), of.gather_own(own_value)
        d_output = of.gather(gradients[0])
        # d(score) = weight * (d(weight) - sum of weight * d(weight)), and that sum is output . d(output)
        mean = (d_output * of.gather(output)).sum(dim=-1, dtype=of.wide)
        d_query = torch.empty_like(of.query)
        d_key = key.new_zeros(of.key.shape)
        d_value = torch.zeros_like(d_key)
        for queries, keys, scores, unseen in of.blocks():
            d_part = d_output[:, queries].flatten(1, 2)
            weights = unseen.exponentials(scores, normaliser[:, queries].unsqueeze(-1))
            d_value[:, keys].baddbmm_(weights.to(query.dtype).flatten(1, 2).transpose(1, 2), d_part)
            d_weights = torch.bmm(d_part, value_of[:, keys].transpose(1, 2)).to(of.wide).view_as(weights)
            d_scores = d_weights.sub_(mean[:, queries].unsqueeze(-1)).mul_(weights)
            d_scores = d_scores.to(query.dtype).flatten(1, 2)
            d_query[:, queries] = torch.bmm(d_scores, of.key[:, keys]).view(d_query[:, queries].shape)
            d_key[:, keys].baddbmm_(d_scores.transpose(1, 2), of.query[:, queries].flatten(1, 2))
        own = of.own_products(of.query, of.own_key).sub_(normaliser).exp_()
        d_own = of.own_products(d_output, own_value_of).sub_(mean).mul_(own)
        own, d_own = own.to(query.dtype).unsqueeze(-1), d_own.to(query.dtype).unsqueeze(-1)
        d_own_key, d_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        for later in range(len(own)):
            d_query.addcmul_(d_own[later], of.own_key[later])
            d_own_key[later] = (d_own[later] * of.query).sum(dim=2).transpose(0, 1)
            d_own_value[later] = (own[later] * d_output).sum(dim=2).transpose(0, 1)
        d_query = of.scatter(d_query.mul_(of.scale))
        return d_query, d_key.transpose(0, 1), d_value.transpose(0, 1), d_own_key, d_own_value, None
