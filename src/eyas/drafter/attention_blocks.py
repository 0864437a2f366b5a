"""Causal attention by matrix products of blocks of queries; runs on every device, in every arithmetic.

Scores are made block by block and made again for the gradient, so that no more than one block of them is
ever held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.few_shapes import filled, missing
from eyas.drafter.wide import wide_dtype

_LEAST_EXPONENT = {
    dtype: math.log(torch.finfo(dtype).tiny) + 1 for dtype in (torch.float32, torch.float64)
}  # fmt: skip
"""Where the exponential is still a normal number."""


class QueryBlock(NamedTuple):
    """Queries ``first:last``, key rows ``key:end`` that they see, and the first row not all of them see."""

    first: int
    last: int
    key: int
    end: int
    behind: int


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_rows: Tensor, blocks: list[QueryBlock]
) -> tuple[Tensor, Tensor]:
    """Output ``[n, heads, D]`` and log-sum-exp of the scores ``[n, heads]``, both at least float32.

    Args:
        query: ``[n, heads, D]``.
        key, value: ``[R, G, D]``.
        query_rows: ``[n]``.
    """
    of = _Grouped(query, key, query_rows, blocks)
    value_of = of.by_group(value)
    output = torch.empty_like(of.query, dtype=of.wide)
    normaliser = of.query.new_empty(of.query.shape[:-1], dtype=of.wide)
    for queries, keys, scores, unseen in of.blocks():
        num_queries = queries.stop - queries.start
        peak = scores.amax(dim=-1, keepdim=True)
        weights = unseen.exponentials(scores, peak)
        total = weights.sum(dim=-1, keepdim=True)
        part = torch.bmm(weights.to(query.dtype).flatten(1, 2), value_of[:, keys])
        output[:, queries] = (part.view(*total.shape[:-1], -1) / total)[:, :num_queries]
        normaliser[:, queries] = total.log_().add_(peak).squeeze(-1)[:, :num_queries]
    return of.scatter(output), of.scatter(normaliser.unsqueeze(-1)).squeeze(-1)


def backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    query_rows: Tensor,
    blocks: list[QueryBlock],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``output`` and ``normaliser`` may be those of a larger softmax."""
    of = _Grouped(query, key, query_rows, blocks)
    value_of = of.by_group(value)
    d_output_of = of.gather(d_output)
    # d(score) = weight * (d(weight) - sum of weight * d(weight)), and that sum is output . d(output)
    mean = (d_output_of * of.gather(output)).sum(dim=-1, keepdim=True, dtype=of.wide)
    normaliser_of = of.gather(normaliser.unsqueeze(-1))
    d_query = torch.empty_like(of.query)
    d_key, d_value = torch.zeros_like(of.key), torch.zeros_like(value_of)
    for queries, keys, scores, unseen in of.blocks():
        # queries that are filled up have no gradient to give, and get none that is kept
        d_part = of.part(d_output_of, queries).flatten(1, 2)
        weights = unseen.exponentials(scores, of.part(normaliser_of, queries))
        d_value[:, keys].baddbmm_(weights.to(query.dtype).flatten(1, 2).transpose(1, 2), d_part)
        d_weights = torch.bmm(d_part, value_of[:, keys].transpose(1, 2)).to(of.wide).view_as(weights)
        d_scores = d_weights.sub_(of.part(mean, queries)).mul_(weights)
        d_scores = d_scores.to(query.dtype).flatten(1, 2)
        d_queries = torch.bmm(d_scores, of.key[:, keys]).view(*weights.shape[:-1], -1)
        d_query[:, queries] = d_queries[:, : queries.stop - queries.start]
        d_key[:, keys].baddbmm_(d_scores.transpose(1, 2), of.part(of.query, queries).flatten(1, 2))
    d_key, d_value = (x[:, : len(key)].transpose(0, 1) for x in (d_key, d_value))
    return of.scatter(d_query.mul_(of.scale)), d_key, d_value


class _Grouped:
    """Queries by the key-value head they share, ``[G, n, group, D]``, and all blocks of their scores.

    In this layout the queries of a block lie side by side, so that products take them without a copy. Where
    the shape of a product matters (`eyas.drafter.few_shapes`), a block takes some rows of keys more, which
    none of its queries sees, and queries of zeros.
    """

    def __init__(self, query: Tensor, key: Tensor, query_rows: Tensor, blocks: list[QueryBlock]) -> None:
        self.num_groups = key.shape[1]
        self.scale = query.shape[-1] ** -0.5
        self.wide = wide_dtype(query.dtype)
        self.query = self.gather(query) * self.scale
        self._rows = query_rows
        self._blocks = [b._replace(end=b.end + missing(query, b.end - b.key)) for b in blocks]
        self._num_keys = max((block.end for block in self._blocks), default=0)
        self.key = self.by_group(key)

    def by_group(self, x: Tensor) -> Tensor:
        """Keys or values ``[R, G, D]`` as ``[G, R, D]``, with rows of zeros that blocks take more."""
        return filled(x, to=max(len(x), self._num_keys)).transpose(0, 1)

    def gather(self, x: Tensor) -> Tensor:
        """``[n, heads, D]`` as ``[G, n, group, D]``, side by side in memory."""
        n, heads, width = x.shape
        parts = x.reshape(n, self.num_groups, heads // self.num_groups, width)
        return parts.transpose(0, 1).contiguous()

    def scatter(self, x: Tensor) -> Tensor:
        """The way back of `gather`."""
        return x.transpose(0, 1).flatten(1, 2)

    def part(self, x: Tensor, queries: slice) -> Tensor:
        """The queries of a block from ``[G, n, group, c]``, filled up."""
        more = missing(self.query, queries.stop - queries.start)
        return F.pad(x[:, queries], (0, 0, 0, 0, 0, more)) if more else x[:, queries]

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor, _Unseen]]:
        """Queries, keys, and scores ``[G, n, group, r]`` of each block, those of unseen keys lowered."""
        for block in self._blocks:
            queries, keys = slice(block.first, block.last), slice(block.key, block.end)
            rows = torch.arange(block.behind, block.end, device=self.query.device)
            query_rows = self._rows[queries]
            seen = (rows <= filled(query_rows, like=self.query).unsqueeze(1)).to(self.wide)
            unseen = _Unseen(seen.unsqueeze(1), block.behind - block.key)
            part = self.part(self.query, queries)
            scores = torch.bmm(part.flatten(1, 2), self.key[:, keys].transpose(1, 2))
            scores = scores.to(self.wide).view(*part.shape[:-1], block.end - block.key)
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
