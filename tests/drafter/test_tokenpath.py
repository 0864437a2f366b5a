"""The layer's start: rows look at themselves, and the next token's own share is added."""

from __future__ import annotations

import torch

from eyas.drafter.batch import TrainingSample
from eyas.drafter.model import EagleDrafter
from eyas.drafter.shape import DrafterShape
from eyas.drafter.tokenpath import start_on_own_row, start_token_path
from eyas.drafter.warmstart import fit_fc
from tests.drafter.cases import make_drafter, make_sample

NORM = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)


def wide_drafter() -> EagleDrafter:
    """A drafter wide enough for random inputs to be unlike each other."""
    shape = DrafterShape(
        hidden_size=128,
        target_hidden_size=128,
        num_aux=3,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        draft_vocab_size=40,
        target_vocab_size=60,
    )
    embedding = torch.randn(60, 128, generator=torch.Generator().manual_seed(1))
    return EagleDrafter(shape, embedding)


def test_every_row_begins_by_looking_at_itself() -> None:
    drafter = wide_drafter()
    start_on_own_row(drafter, seed=3)
    attention, generator = drafter.midlayer.self_attn, torch.Generator().manual_seed(5)
    inputs = torch.randn(50, 256, generator=generator)
    inputs = inputs / inputs.pow(2).mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        queries = attention.q_proj(inputs).view(50, 4, 32)
        keys = attention.k_proj(inputs).view(50, 2, 32)
    own = 0
    for head in range(4):
        scores = queries[:, head] @ keys[:, head // 2].T / 32**0.5
        own += int((scores.argmax(-1) == torch.arange(50)).sum())
        assert 6 < scores.diagonal().mean() < 12
        weights = scores.softmax(-1).diagonal()
        assert weights.mean() > 0.7
    assert own >= 195


def test_the_map_is_added_up_to_its_rank() -> None:
    drafter = make_drafter()
    shape, attention = drafter.shape, drafter.midlayer.self_attn
    generator = torch.Generator().manual_seed(0)
    rank = shape.num_kv_heads * shape.head_dim
    full = torch.randn(shape.hidden_size, shape.hidden_size, generator=generator, dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(full)
    kept = start_token_path(drafter, full)
    wanted = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    assert abs(kept - float((sizes[:rank] ** 2).sum() / (sizes**2).sum())) < 1e-9
    embedded = torch.randn(shape.hidden_size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        value = attention.v_proj.weight.double() @ torch.cat((embedded, torch.zeros_like(embedded)))
        groups = value.view(shape.num_kv_heads, shape.head_dim)
        heads = [groups[h // (shape.num_heads // shape.num_kv_heads)] for h in range(shape.num_heads)]
        added = attention.o_proj.weight.double() @ torch.cat(heads)
    torch.testing.assert_close(added, wanted @ embedded, atol=1e-9, rtol=1e-9)
    assert not drafter.midlayer.mlp.down_proj.weight.any()


def test_a_state_that_follows_from_aux_and_token_is_found() -> None:
    """Next states made of a linear map of the aux states plus one of the next token's embedding."""
    drafter = make_drafter()
    shape = drafter.shape
    generator = torch.Generator().manual_seed(2)
    from_aux = torch.randn(12, 36, generator=generator, dtype=torch.float64)
    from_token = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    embedded = drafter.embedding.double()
    embedded = embedded * torch.rsqrt(embedded.pow(2).mean(-1, keepdim=True) + shape.rms_norm_eps)
    made = []
    for i in range(60):
        sample, (tokens, _, aux, last) = make_sample(f"s{i}", 14, [(2, 7), (8, 14)], i)
        following = torch.as_tensor(list(tokens))[1:]
        last[1:] = (aux.flatten(1)[:-1] @ from_aux.T + embedded[following] @ from_token.T) * NORM
        made.append(
            TrainingSample(
                sample.id,
                sample.tokens,
                sample.spans,
                aux,
                last[torch.from_numpy(sample.last_rows)],
                sample.last_rows,
            )
        )
    fit_fc(drafter, made, NORM, with_token=True)
    plain = drafter.state_dict()["fc.weight"]
    assert (plain - from_aux).norm() / from_aux.norm() < 0.02
