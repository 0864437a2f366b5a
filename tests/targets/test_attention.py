"""Grouped attention against attention written out."""

from __future__ import annotations

import pytest
import torch

from eyas.targets.local.attention import active_rows, grouped_attention, grouped_mask
from eyas.targets.local.cache import RaggedCache


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, scale: float
) -> torch.Tensor:
    """[B, q, H, D_v] by loops over rows, heads and queries."""
    batch, heads, num_queries, _ = query.shape
    groups = heads // key.shape[1]
    result = torch.zeros(batch, num_queries, heads, value.shape[-1], dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            for i in range(num_queries):
                seen = allowed[b, i].nonzero().flatten()
                scores = key[b, h // groups, seen] @ query[b, h, i] * scale
                result[b, i, h] = torch.softmax(scores, 0) @ value[b, h // groups, seen]
    return result


def tensors(heads: int, kv_heads: int, num_queries: int, kv: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(heads * 10 + num_queries)
    shape = {"generator": draw, "dtype": torch.float64}
    return (
        torch.randn((3, heads, num_queries, 8), **shape),
        torch.randn((3, kv_heads, kv, 8), **shape),
        torch.randn((3, kv_heads, kv, 6), **shape),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("boolean", [True, False])
def test_with_a_mask(heads: int, kv_heads: int, num_queries: int, boolean: bool) -> None:
    query, key, value = tensors(heads, kv_heads, num_queries, 16)
    allowed = torch.rand((3, num_queries, 16), generator=torch.Generator().manual_seed(3)) < 0.5
    allowed[:, :, 0] = True
    mask = allowed[:, None]
    if not boolean:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    found, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, written_out(query, key, value, allowed, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("extra", [None, "softcap", "sinks"])
def test_causal_order_without_a_mask(extra: str | None) -> None:
    query, key, value = tensors(6, 2, 5, 5)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()[None].expand(3, -1, -1)
    if extra is None:
        found, _ = grouped_attention(module, query, key, value, None, scaling=0.3)
        expected = written_out(query, key, value, allowed, 0.3)
    else:
        sinks = torch.randn(6, dtype=torch.float64) if extra == "sinks" else None
        softcap = 0.7 if extra == "softcap" else None
        found, _ = grouped_attention(
            module, query, key, value, None, scaling=0.3, softcap=softcap, s_aux=sinks
        )
        scores = query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed[:, None], float("-inf"))
        total = scores.exp().sum(-1) + (0 if sinks is None else sinks.exp()[None, :, None])
        expected = ((scores.exp() / total[..., None]) @ value.repeat_interleave(3, 1)).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def mask_of(starts: list[int], num_new: int, **arguments: object) -> tuple[torch.Tensor | None, int]:
    cache = RaggedCache(1, len(starts), torch.device("cpu"))
    rows = cache.begin(starts, num_new)
    token = active_rows.set(rows)
    try:
        return grouped_mask(len(starts), num_new, rows.view_length, **arguments), rows.view_length  # type: ignore[arg-type]
    finally:
        active_rows.reset(token)


def test_masks_of_rows_by_hand() -> None:
    mask, kv = mask_of([0, 3, 9], 2)
    assert mask is not None
    assert kv == 16
    for row, start in enumerate((0, 3, 9)):
        for i in range(2):
            allowed = (mask[row, 0, i] == 0).tolist()
            assert allowed == [position <= start + i for position in range(16)]


def test_masks_of_a_sliding_window_by_hand() -> None:
    mask, _ = mask_of([1, 9], 2, mask_function=lambda b, h, q, k: (k <= q) & (k > q - 3))
    assert mask is not None
    for row, start in enumerate((1, 9)):
        for i in range(2):
            allowed = (mask[row, 0, i] == 0).nonzero().flatten().tolist()
            assert allowed == [p for p in range(start + i - 2, start + i + 1) if p >= 0]


def test_fresh_rows_and_no_session_need_no_mask() -> None:
    assert mask_of([0, 0], 5)[0] is None
    assert grouped_mask(2, 5, 5) is None
