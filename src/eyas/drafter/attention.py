"""Attention of a draft step: all earlier rows at step 0, and the row itself at later steps.

Row t at step j attends, in one softmax, to the step-0 keys of rows <= t of its sample and to its own
keys of steps 1..j. Scores are made block by block of queries and made again for the gradient, so that
no more than one block of them is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_SCORES = 1 << 23
"""Most scores held at a time (heads times queries times keys)."""
BLOCK_QUERIES = 256
"""Most queries in a block: keys behind a block's last query are skipped, so short blocks save work."""


@dataclass(frozen=True)
class AttentionPlan:
    """Which queries meet which keys.

    Attributes:
        query_rows: ``[n]`` row number of each query, ascending; a query sees the rows of its sample up
            to its own.
        blocks: (first query, last query + 1, first key row, last key row + 1), each within one sample.
    """

    query_rows: Tensor
    blocks: list[tuple[int, int, int, int]]


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
            blocks.append((start, stop, first_key, int(rows[stop - 1]) + 1))
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


class _Block:
    """One block of queries, laid out ``[G, group * n, D]`` so that heads that share keys are one product."""

    def __init__(
        self, tensors: tuple[Tensor, ...], plan: AttentionPlan, block: tuple[int, int, int, int]
    ) -> None:
        query, key, value, own_key, own_value = tensors
        self.queries = slice(block[0], block[1])
        self.keys = slice(block[2], block[3])
        self.num_groups = key.shape[1]
        self.num_queries = block[1] - block[0]
        self.query = self.gather(query)
        self.key = key[self.keys].transpose(0, 1)
        self.value = value[self.keys].transpose(0, 1)
        self.own_key = own_key[:, self.queries]
        self.own_value = own_value[:, self.queries]
        rows = torch.arange(block[2], block[3], device=query.device)
        self.future = rows > plan.query_rows[self.queries].unsqueeze(1)

    def gather(self, x: Tensor) -> Tensor:
        """``[n, heads, D]`` of all queries to this block's ``[G, group * n, D]``."""
        part = x[self.queries]
        n, heads, width = part.shape
        parts = part.view(n, self.num_groups, heads // self.num_groups, width).permute(1, 2, 0, 3)
        return parts.reshape(self.num_groups, -1, width)

    def scatter(self, part: Tensor, into: Tensor) -> None:
        """The way back of `gather`."""
        width = part.shape[-1]
        parts = part.view(self.num_groups, -1, self.num_queries, width).permute(2, 0, 1, 3)
        into[self.queries] = parts.reshape(self.num_queries, -1, width)

    def per_query(self, x: Tensor) -> Tensor:
        """``[G, group * n, c]`` as ``[G, group, n, c]``."""
        return x.view(self.num_groups, -1, self.num_queries, x.shape[-1])

    def scores(self) -> tuple[Tensor, Tensor]:
        """Scores of step-0 keys ``[G, group * n, r]`` and own keys ``[G, group, n, j]``, at least float32."""
        scale = self.query.shape[-1] ** -0.5
        shared = torch.bmm(self.query, self.key.transpose(1, 2)).mul_(scale)
        shared = shared.to(_wide(shared.dtype))
        self.per_query(shared).masked_fill_(self.future, float("-inf"))
        own = torch.einsum("grnd,jngd->grnj", self.per_query(self.query), self.own_key) * scale
        return shared, own.to(shared.dtype)


class _StepAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, plan = arguments
        query = tensors[0]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        normaliser = query.new_empty(query.shape[:2], dtype=_wide(query.dtype))
        for block in _blocks(tuple(tensors), plan):
            shared, own = block.scores()
            peak = torch.logsumexp(shared, dim=-1, keepdim=True)
            if own.shape[-1]:
                every = torch.cat((block.per_query(peak), own), dim=-1)
                peak = torch.logsumexp(every, dim=-1, keepdim=True).view_as(peak)
            weights = shared.sub_(peak).exp_()
            part = torch.bmm(weights.to(query.dtype), block.value)
            if own.shape[-1]:
                own = own.sub_(block.per_query(peak)).exp_()
                part += torch.einsum("grnj,jngd->grnd", own.to(query.dtype), block.own_value).reshape_as(part)
            block.scatter(part, output)
            block.scatter(peak, normaliser.unsqueeze(-1))
        ctx.plan = plan
        ctx.save_for_backward(*tensors, output, normaliser)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, normaliser = ctx.saved_tensors
        query, key, value, own_key, own_value = tensors
        d_output = gradients[0].contiguous()
        d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        d_own_key, d_own_value = torch.zeros_like(own_key), torch.zeros_like(own_value)
        scale = query.shape[-1] ** -0.5
        for block in _blocks(tuple(tensors), ctx.plan):
            shared, own = block.scores()
            peak = block.gather(normaliser.unsqueeze(-1))
            d_part = block.gather(d_output)
            weights = shared.sub_(peak).exp_()
            narrow = weights.to(query.dtype)
            d_value[block.keys] += torch.bmm(narrow.transpose(1, 2), d_part).transpose(0, 1)
            # d(score) = weight * (d(weight) - sum of weight * d(weight)), and that sum is output . d(output)
            mean = (d_part * block.gather(output)).sum(-1, keepdim=True).to(weights.dtype)
            d_shared = torch.bmm(d_part, block.value.transpose(1, 2)).to(weights.dtype)
            d_scores = weights.mul_(d_shared.sub_(mean)).mul_(scale).to(query.dtype)
            d_block = torch.bmm(d_scores, block.key)
            d_key[block.keys] += torch.bmm(d_scores.transpose(1, 2), block.query).transpose(0, 1)
            if own.shape[-1]:
                own = own.sub_(block.per_query(peak)).exp_()
                d_grouped = block.per_query(d_part)
                d_own_value[:, block.queries] = torch.einsum(
                    "grnj,grnd->jngd", own.to(query.dtype), d_grouped
                )
                d_own = torch.einsum("grnd,jngd->grnj", d_grouped, block.own_value).to(own.dtype)
                d_own = own.mul_(d_own.sub_(block.per_query(mean))).mul_(scale).to(query.dtype)
                d_block += torch.einsum("grnj,jngd->grnd", d_own, block.own_key).reshape_as(d_block)
                d_own_key[:, block.queries] = torch.einsum(
                    "grnj,grnd->jngd", d_own, block.per_query(block.query)
                )
            block.scatter(d_block, d_query)
        return d_query, d_key, d_value, d_own_key, d_own_value, None


def _blocks(tensors: tuple[Tensor, ...], plan: AttentionPlan) -> Iterator[_Block]:
    return (_Block(tensors, plan, block) for block in plan.blocks)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
