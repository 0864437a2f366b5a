"""Attention of a draft step: all earlier rows at step 0, and the row itself at later steps.

Row t at step j attends, in one softmax, to the step-0 keys of rows <= t of its sample and to its own
keys of steps 1..j. The first part is made by a kernel that also gives its log-sum-exp: with it the few
own keys are merged in afterwards, and its backward, called with the merged output and log-sum-exp, gives
the gradients of the whole softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.drafter import attention_blocks, attention_flash
from eyas.drafter.attention_blocks import QueryBlock
from eyas.drafter.kernels.compiled import kernels_for
from eyas.drafter.wide import wide_dtype

BLOCK_SCORES = 1 << 23
"""Most scores held at a time (heads times queries times keys)."""
BLOCK_QUERIES = {"blocks": 128, "flash": 256}
"""Most queries in a block: keys behind a block's last query are skipped, so short blocks save work."""
USE_FLASH = {"forward": True, "backward": True}
"""Take torch's fused kernel where there is one; off: products of blocks, which run everywhere."""


@dataclass(frozen=True)
class AttentionPlan:
    """Which queries meet which keys.

    Attributes:
        query_rows: ``[n]`` row number of each query, ascending; a query sees the rows of its sample up
            to its own.
        forward, backward: the blocks of each pass.
    """

    query_rows: Tensor
    forward: Blocks
    backward: Blocks


@dataclass(frozen=True)
class Blocks:
    """Queries with the keys that any of them sees, each block within one sample.

    Attributes:
        flash: the kernel they were cut for.
    """

    flash: bool
    blocks: list[QueryBlock]

    @property
    def kernel(self) -> ModuleType:
        return attention_flash if self.flash else attention_blocks


def plan_attention(
    rows: npt.NDArray[np.int64],
    row_bounds: list[int],
    num_heads: int,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Cut the queries of ``rows`` into blocks within samples and within the memory that scores may take."""
    there = attention_flash.is_there(device, dtype)
    # bfloat16: the fused kernel's backward is slower than products, without matrix units its forward too
    narrow = dtype == torch.bfloat16
    fused = {"forward": there and not (narrow and not _matrix_units()), "backward": there and not narrow}
    forward, backward = (
        Blocks(flash, _blocks(rows, row_bounds, num_heads, flash))
        for flash in (fused[way] and USE_FLASH[way] for way in ("forward", "backward"))
    )
    return AttentionPlan(torch.from_numpy(rows).to(device), forward, backward)


def _matrix_units() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX)."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(ask is not None and ask())


def _blocks(
    rows: npt.NDArray[np.int64], row_bounds: list[int], num_heads: int, flash: bool
) -> list[QueryBlock]:
    largest = BLOCK_QUERIES["flash" if flash else "blocks"]
    edges = np.searchsorted(rows, np.asarray(row_bounds))
    blocks = []
    for sample, first_key in enumerate(row_bounds[:-1]):
        start, end = int(edges[sample]), int(edges[sample + 1])
        longest = row_bounds[sample + 1] - first_key
        if flash and end > start and rows[end - 1] - first_key == end - start - 1:
            # queries from the first row on, none left out: the kernel knows that without a mask
            blocks.append(QueryBlock(start, end, first_key, int(rows[end - 1]) + 1, first_key + 1))
            continue
        while start < end:
            size = max(1, min(largest, BLOCK_SCORES // (num_heads * longest)))
            stop = min(start + size, end)
            last_key = int(rows[stop - 1]) + 1
            blocks.append(QueryBlock(start, stop, first_key, last_key, int(rows[start]) + 1))
            start = stop
    return blocks


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


class _StepAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, own_key, own_value, plan = arguments
        output, normaliser = plan.forward.kernel.forward(
            query, key, value, plan.query_rows, plan.forward.blocks
        )
        kernels = kernels_for(query)
        if len(own_key) and kernels is not None:
            output = output.to(query.dtype).contiguous()
            normaliser = normaliser.contiguous()
            kernels.merge_own(
                query.contiguous(), own_key.contiguous(), own_value.contiguous(), output, normaliser
            )
        elif len(own_key):
            own = _own_products(_quick(query), own_key).mul_(query.shape[-1] ** -0.5)
            first = normaliser
            for score in own:
                normaliser = torch.logaddexp(normaliser, score)
            output = output * (first - normaliser).exp_().unsqueeze(-1)
            for weight, later in zip(own.sub_(normaliser).exp_(), own_value, strict=True):
                by_group(output, later).addcmul_(by_group(weight.unsqueeze(-1), later), later.unsqueeze(2))
        merged: Tensor = output.to(query.dtype)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, own_key, own_value, merged, normaliser)
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, output, normaliser = ctx.saved_tensors
        plan, d_output = ctx.plan, gradients[0].contiguous()
        d_query, d_key, d_value = plan.backward.kernel.backward(
            d_output, query, key, value, output, normaliser, plan.query_rows, plan.backward.blocks
        )
        kernels = kernels_for(query)
        if len(own_key) and kernels is not None:
            d_query = d_query.contiguous()
            d_own_key, d_own_value = kernels.merge_own_gradient(
                d_output,
                query.contiguous(),
                own_key.contiguous(),
                own_value.contiguous(),
                output,
                normaliser,
                d_query,
            )
            return d_query, d_key, d_value, d_own_key, d_own_value, None
        d_own_key, d_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        if len(own_key):
            scale, queries, d_outputs = query.shape[-1] ** -0.5, _quick(query), _quick(d_output)
            own = _own_products(queries, own_key).mul_(scale).sub_(normaliser).exp_()
            # d(score) = weight * (d(weight) - sum of weight * d(weight)), and that sum is output . d(output)
            mean = (d_outputs * output).sum(dim=-1, dtype=own.dtype)
            d_own = _own_products(d_outputs, own_value).sub_(mean).mul_(own).mul_(scale)
            own, d_own = own.to(queries.dtype).unsqueeze(-1), d_own.to(queries.dtype).unsqueeze(-1)
            d_queries = _quick(d_query)
            for step, later in enumerate(own_key):
                weight, d_score = by_group(own[step], later), by_group(d_own[step], later)
                by_group(d_queries, later).addcmul_(d_score, _quick(later).unsqueeze(2))
                d_own_key[step] = (d_score * by_group(queries, later)).sum(dim=2)
                d_own_value[step] = (weight * by_group(d_outputs, later)).sum(dim=2)
            d_query = d_queries.to(query.dtype)
        return d_query, d_key, d_value, d_own_key, d_own_value, None


def _quick(x: Tensor) -> Tensor:
    """In the arithmetic in which single numbers are quickest: wide on a CPU, which would widen each time."""
    return x.to(wide_dtype(x.dtype)) if x.device.type == "cpu" else x


def by_group(x: Tensor, like: Tensor) -> Tensor:
    """``[n, heads, c]`` as ``[n, G, group, c]``, with the G of ``like [n, G, D]``."""
    return x.view(len(x), like.shape[1], x.shape[1] // like.shape[1], x.shape[-1])


def _own_products(x: Tensor, own: Tensor) -> Tensor:
    """Products of ``x [n, heads, D]`` with the row's own ``[j, n, G, D]``: ``[j, n, heads]``, wide."""
    wide = wide_dtype(x.dtype)
    products = x.new_empty((len(own), *x.shape[:2]), dtype=wide)
    for product, later in zip(products, own, strict=True):
        part = by_group(x, later) * later.to(x.dtype).unsqueeze(2)
        product.copy_(part.sum(dim=-1, dtype=wide).view_as(product))
    return products
