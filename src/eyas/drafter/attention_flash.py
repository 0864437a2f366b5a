"""Causal attention by torch's fused kernel for the CPU, which gives the log-sum-exp of its scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.attention_blocks import QueryBlock
from eyas.drafter.few_shapes import filled, missing
from eyas.drafter.wide import wide_dtype

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def is_there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has the kernel for a device and an arithmetic."""
    return device.type == "cpu" and dtype in _DTYPES and hasattr(torch.ops.aten, _NAME)


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_rows: Tensor, blocks: list[QueryBlock]
) -> tuple[Tensor, Tensor]:
    """As `eyas.drafter.attention_blocks.forward`; the output is in the arithmetic of the query."""
    kernel = getattr(torch.ops.aten, _NAME)
    key, value = _for_each_head(key, query), _for_each_head(value, query)
    outputs, normalisers = [query[:0]], [query.new_empty((0, query.shape[1]), dtype=wide_dtype(query.dtype))]
    for block in blocks:
        queries, keys = slice(block.first, block.last), slice(block.key, block.end)
        mask, causal = _mask(block, query_rows, query.dtype)
        output, normaliser = kernel(
            _heads(query[queries]), _heads(key[keys]), _heads(value[keys]), 0.0, causal, attn_mask=mask
        )
        outputs.append(_rows(output))
        normalisers.append(normaliser[0].transpose(0, 1))
    return torch.cat(outputs), torch.cat(normalisers)


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
    """As `eyas.drafter.attention_blocks.backward`."""
    kernel = getattr(torch.ops.aten, _NAME + "_backward")
    num_groups = key.shape[1]
    key, value = _for_each_head(key, query), _for_each_head(value, query)
    d_query = [query[:0]]
    d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    for block in blocks:
        queries, keys = slice(block.first, block.last), slice(block.key, block.end)
        mask, causal = _mask(block, query_rows, query.dtype)
        if mask is not None:
            # keys that are filled up are never seen; queries that are have no gradient to give
            mask = F.pad(mask, (0, missing(key, block.end - block.key)), value=float("-inf"))
            mask = F.pad(mask, (0, 0, 0, missing(query, block.last - block.first)))
        d_queries, d_keys, d_values = kernel(
            _heads(filled(d_output[queries])),
            _heads(filled(query[queries])),
            _heads(filled(key[keys])),
            _heads(filled(value[keys])),
            _heads(filled(output[queries])),
            filled(normaliser[queries], like=query).transpose(0, 1).unsqueeze(0).contiguous(),
            0.0,
            causal,
            attn_mask=mask,
        )
        d_query.append(_rows(d_queries)[: block.last - block.first])
        d_key[keys] += _rows(d_keys)[: block.end - block.key]
        d_value[keys] += _rows(d_values)[: block.end - block.key]
    shape = (len(key), num_groups, key.shape[1] // num_groups, key.shape[-1])
    return torch.cat(d_query), d_key.view(shape).sum(dim=2), d_value.view(shape).sum(dim=2)


def _mask(block: QueryBlock, query_rows: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """What the kernel is told of unseen keys: a mask to add ``[1, 1, n, r]``, or that all is causal."""
    if block.behind == block.key + 1 and block.last - block.first == block.end - block.key:
        return None, True
    rows = torch.arange(block.key, block.end, device=query_rows.device)
    unseen = rows > query_rows[block.first : block.last].unsqueeze(1)
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))[None, None], False


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """``[R, G, D]`` as ``[R, heads, D]``."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _heads(x: Tensor) -> Tensor:
    """``[n, heads, D]`` as ``[1, heads, n, D]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _rows(x: Tensor) -> Tensor:
    """The way back of `_heads`."""
    return x[0].transpose(0, 1)
