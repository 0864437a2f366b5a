"""Grouped attention against attention written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from eyas.targets.local.attention import active_rows, grouped_attention, grouped_mask
from eyas.targets.local.cache import RaggedCache
from eyas.targets.local.model import LocalTarget
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model


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


@pytest.mark.parametrize("kind", ["llama", "sliding", "softcap", "sinks"])
def test_models_equal_their_own_eager_attention(tmp_path: Path, kind: str) -> None:
    """Whole models, also with score caps and attention sinks, by sessions and by transformers' eager code."""
    if kind in ("llama", "sliding"):
        model = tiny_model(kind)
    else:
        sizes = tiny_config("qwen3").to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        common = {name: sizes[name] for name in names} | {
            "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15,
            "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None, "sliding_window": 8,
        }  # fmt: skip
        if kind == "softcap":
            config = transformers.Gemma2Config(**common, query_pre_attn_scalar=4, attn_logit_softcapping=2.0)
        else:
            config = transformers.GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    eager = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    target = LocalTarget.load(tmp_path)
    assert target.ragged_fault is None
    rows = [[(7 * i + 5 * n) % VOCAB_SIZE for i in range(n)] for n in (30, 12)]
    session = target.session(2)
    session.prefill([rows[0][:21], rows[1][:4]])
    found = session.forward(
        torch.tensor([rows[0][21:], [*rows[1][4:], 0]]), torch.tensor([9, 8]), logits="all"
    ).logits
    for row, start in enumerate((21, 4)):
        with torch.no_grad():
            expected = eager(torch.tensor([rows[row]])).logits[0]
        torch.testing.assert_close(
            found[row, : len(rows[row]) - start], expected[start:], rtol=1e-4, atol=1e-4
        )
        captured = target.logits(target.capture([rows[row]], [1])[0].last)
        torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-4)
