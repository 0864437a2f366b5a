"""Attention for grouped queries and for rows of different lengths, plugged into transformers by name.

transformers repeats keys and values for every query head of a group whenever there is a mask. Here the
query heads of a group become further queries of their one key head instead, which is the same sum in
another shape, and reads the cache once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from eyas.targets.local.cache import RowState

NAME = "eyas_grouped"
"""``attn_implementation`` under which transformers finds this attention."""

active_rows: ContextVar[RowState | None] = ContextVar("active_rows", default=None)
"""The rows of the session whose forward pass is running; None outside of sessions."""


def grouped_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> torch.Tensor | None:
    """The mask of one kind of layer: [B, 1, q, kv], additive (0 or -inf), or None where causal order is all.

    Outside of a session, and for rows that start at zero, transformers' own mask is taken. Inside, query i
    of row b stands at ``starts[b] + i``; ``mask_function`` says what it may see (causal, sliding window,
    chunked), so every kind of layer gets its own mask.
    """
    rows = active_rows.get()
    if rows is None or rows.fresh or attention_mask is not None:
        mask: torch.Tensor | None = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            dtype=dtype,
            **others,
        )
        return mask
    device = rows.starts.device
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    queries = rows.positions[:, None, :, None]
    if rows.lineage is not None:
        keys, related = _tree_keys(rows, rows.lineage, kv_length)
        allowed = mask_function(batch, head, queries, keys) & related
    else:
        allowed = mask_function(batch, head, queries, keys)
    allowed = allowed.expand(batch_size, 1, q_length, kv_length)
    additive = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return additive.masked_fill_(allowed.logical_not(), float("-inf"))


def _tree_keys(rows: RowState, lineage: torch.Tensor, kv_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of what is stored, [B, 1, 1, kv], and what each new token descends from, [B, 1, q, kv].

    Nodes are stored one behind the other; their positions are those of their depths.
    """
    num_new = lineage.shape[1]
    stored = torch.arange(kv_length, device=lineage.device)[None, :]
    place = stored - rows.starts[:, None]
    node = place.clamp(0, num_new - 1)
    positions = torch.where(place < 0, stored, rows.positions.gather(1, node))
    inside = (place >= 0) & (place < num_new)
    related = lineage.gather(2, node[:, None, :].expand(-1, num_new, -1)) & inside[:, None, :]
    return positions[:, None, None, :], ((place < 0)[:, None, :] | related)[:, None]


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers' interface asks for.

    Args:
        query: [B, H, q, D]. ``key``: [B, H_kv, kv, D]. ``value``: [B, H_kv, kv, D_v].
        attention_mask: [B or 1, 1, q, kv], additive or boolean, or None for causal order.

    Returns:
        [B, q, H, D_v] and None.
    """
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        return _written_out(module, query, key, value, attention_mask, scaling, others), None
    groups = query.shape[1] // key.shape[1]
    num_queries = query.shape[2]
    if groups == 1 or attention_mask is None or others.get("position_bias") is not None or dropout:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return output
    if attention_mask.is_floating_point() and attention_mask.dtype != query.dtype:
        attention_mask = attention_mask.to(query.dtype)
    batch, num_heads, _, width = query.shape
    folded = query.reshape(batch, key.shape[1], groups * num_queries, width)
    attended = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=_tile(attention_mask, groups), scale=scaling
    )
    return attended.reshape(batch, num_heads, num_queries, value.shape[-1]).transpose(1, 2), None


def _tile(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, 1, q, kv] repeated for each query head of a group: [B, 1, groups * q, kv]; once per forward."""
    if mask.shape[2] == 1:
        return mask.expand(-1, -1, groups, -1)
    rows = active_rows.get()
    if rows is None:
        return mask.repeat(1, 1, groups, 1)
    known = rows.tiled.get((id(mask), groups))
    if known is None or known[0] is not mask:
        known = (mask, mask.repeat(1, 1, groups, 1))
        rows.tiled[(id(mask), groups)] = known
    return known[1]


def _written_out(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    others: dict[str, Any],
) -> torch.Tensor:
    """Softmax attention step by step, for score caps and attention sinks, which SDPA does not know."""
    batch, num_heads, num_queries, width = query.shape
    groups = num_heads // key.shape[1]
    grouped = query.reshape(batch, key.shape[1], groups, num_queries, width)
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    scores = scores * (width**-0.5 if scaling is None else scaling)
    softcap, sinks = others.get("softcap"), others.get("s_aux")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and num_queries > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(num_queries, key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.unsqueeze(2).logical_not(), float("-inf"))
    elif mask is not None:
        scores = scores + mask.unsqueeze(2)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, key.shape[1], groups, 1, 1)
        scores = torch.cat([scores, column.expand(batch, -1, -1, num_queries, 1)], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype)[..., : key.shape[2]]
    attended = weights @ value.unsqueeze(2)
    return attended.reshape(batch, num_heads, num_queries, value.shape[-1]).transpose(1, 2)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, grouped_mask)
