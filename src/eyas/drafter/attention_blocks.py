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
from eyas.drafter.kernels.compiled import kernels_for
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
    """Output ``[n, heads, D]`` in the arithmetic of the query, and log-sum-exp of the scores ``[n, heads]``,
    at least float32.

    Args:
        query: ``[n, heads, D]``.
        key, value: ``[R, G, D]``.
        query_rows: ``[n]``.
    """
    of = _Grouped(query, key, query_rows, blocks)
    value_of = of.by_group(value)
    output = torch.empty_like(of.query)
    normaliser = of.query.new_empty(of.query.shape[:-1], dtype=of.wide)
    for queries, keys, scores, seen in of.blocks():
        num_queries = queries.stop - queries.start
        weights, part_normaliser = seen.softmax(scores)
        part = torch.bmm(weights.flatten(1, 2), value_of[:, keys]).view(*weights.shape[:-1], -1)
        output[:, queries] = part[:, :num_queries]
        normaliser[:, queries] = part_normaliser[:, :num_queries]
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
    mean = (d_output_of * of.gather(output)).sum(dim=-1, dtype=of.wide)
    normaliser_of = of.gather(normaliser.unsqueeze(-1)).squeeze(-1)
    d_query = torch.empty_like(of.query)
    d_key, d_value = torch.zeros_like(of.key), torch.zeros_like(value_of)
    for queries, keys, scores, seen in of.blocks():
        # queries that are filled up have no gradient to give, and get none that is kept
        d_part = of.part(d_output_of, queries).flatten(1, 2)
        d_weights = torch.bmm(d_part, value_of[:, keys].transpose(1, 2)).view_as(scores)
        weights, d_scores = seen.gradient(
            scores, d_weights, of.part(normaliser_of, queries), of.part(mean, queries)
        )
        d_scores = d_scores.flatten(1, 2)
        d_value[:, keys].baddbmm_(weights.flatten(1, 2).transpose(1, 2), d_part)
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
        """The queries of a block from ``[G, n, ...]``, filled up."""
        more = missing(self.query, queries.stop - queries.start)
        return F.pad(x[:, queries], (0, 0) * (x.ndim - 2) + (0, more)) if more else x[:, queries]

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor, _Seen]]:
        """Queries, keys, and scores ``[G, n, group, r]`` of each block, with what is seen of them."""
        for block in self._blocks:
            queries, keys = slice(block.first, block.last), slice(block.key, block.end)
            rows = filled(self._rows[queries], like=self.query)
            part = self.part(self.query, queries)
            scores = torch.bmm(part.flatten(1, 2), self.key[:, keys].transpose(1, 2))
            scores = scores.view(*part.shape[:-1], block.end - block.key)
            yield queries, keys, scores, _Seen(rows - block.key + 1, block.behind - block.key)


class _Seen:
    """How many keys each query of a block sees, the first ones always: softmax and gradient of its scores.

    Args:
        counts: int64 ``[n]``.
        all_see: keys that every query sees.
    """

    def __init__(self, counts: Tensor, all_see: int) -> None:
        self._counts, self._all_see = counts, all_see

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and log-sum-exp ``[G, n, group]`` of ``scores [G, n, group, r]``, which may be changed."""
        kernels = kernels_for(scores)
        if kernels is not None:
            return scores, kernels.weights_of_scores(scores, self._counts)
        wide, seen = self._lowered(scores)
        peak = wide.amax(dim=-1, keepdim=True)
        weights = self._exponentials(wide, peak, seen)
        total = weights.sum(dim=-1, keepdim=True)
        return weights.div_(total).to(scores.dtype), total.log_().add_(peak).squeeze(-1)

    def gradient(
        self, scores: Tensor, d_weights: Tensor, normaliser: Tensor, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights and d(scores), both ``[G, n, group, r]``; what is given may be changed.

        Args:
            normaliser, mean: ``[G, n, group]``, of the whole softmax: log-sum-exp, sum of weight * d(weight).
        """
        kernels = kernels_for(scores)
        if kernels is not None:
            kernels.gradient_of_scores(
                scores, d_weights, self._counts, normaliser.contiguous(), mean.contiguous()
            )
            return scores, d_weights
        wide, seen = self._lowered(scores)
        weights = self._exponentials(wide, normaliser.unsqueeze(-1), seen)
        d_scores = d_weights.to(wide.dtype).sub_(mean.unsqueeze(-1)).mul_(weights)
        return weights.to(scores.dtype), d_scores.to(scores.dtype)

    def _lowered(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Wide scores, those of unseen keys below all others; and for the keys that not all queries see
        ``[n, 1, r']``, one where a key is seen and zero elsewhere."""
        wide = scores.to(wide_dtype(scores.dtype))
        keys = torch.arange(self._all_see, scores.shape[-1], device=scores.device)
        seen = (keys < self._counts.unsqueeze(1)).to(wide.dtype).unsqueeze(1)
        wide[..., self._all_see :].add_((seen - 1) * (torch.finfo(wide.dtype).max / 4))
        return wide, seen

    def _exponentials(self, scores: Tensor, peak: Tensor, seen: Tensor) -> Tensor:
        """In place, exp(scores - peak), exactly zero where a key is not seen.

        The exponential of a number that underflows takes ten to twenty times as long as another on a CPU,
        so unseen scores are lifted before it and removed after it.
        """
        scores.sub_(peak)
        behind = scores[..., self._all_see :]
        behind.clamp_(min=_LEAST_EXPONENT[scores.dtype])
        scores.exp_()
        behind.mul_(seen)
        return scores
