"""The reference forward against loops in float64, and the comparison that guards an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.base.errors import DataError, ExportMismatch
from eyas.export.layout import read_eagle3
from eyas.export.reference import ReferenceDrafter, largest_difference, require_agreement
from eyas.export.rotary import rotary_frequencies
from tests.export import make
from tests.export.naive import naive_logits

TOKENS = [5, 17, 3, 3, 80, 41, 2, 9]


def aux_states(num_aux: int = 3) -> torch.Tensor:
    return torch.randn(len(TOKENS), num_aux, make.HIDDEN, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize(("norms", "num_aux"), [("eagle3", 3), ("eagle3.1", 3), ("eagle3", 2)])
def test_logits_of_every_row_and_step(tmp_path: Path, norms: str, num_aux: int) -> None:
    layers = (2, 6, 9)[:num_aux]
    made = make.write(tmp_path, aux_layers=layers, norms=norms, num_aux=num_aux)
    aux = aux_states(num_aux)
    steps = ReferenceDrafter(read_eagle3(tmp_path), make.embedding(), torch.float64).unroll(TOKENS, aux, 4)
    expected = naive_logits(
        {n: t.double().numpy() for n, t in made.items()},
        make.shape(norms=norms, num_aux=num_aux),
        make.embedding().double().numpy(),
        TOKENS,
        aux.double().numpy(),
        4,
    )
    assert [len(s) for s in steps] == [7, 6, 5, 4]
    for ours, theirs in zip(steps, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), np.stack(theirs), rtol=1e-10, atol=1e-12)


def test_more_steps_than_tokens(tmp_path: Path) -> None:
    make.write(tmp_path)
    steps = ReferenceDrafter(read_eagle3(tmp_path), make.embedding()).unroll(TOKENS[:2], aux_states()[:2], 3)
    assert [tuple(s.shape) for s in steps] == [(1, 40), (0, 40), (0, 40)]


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.3,
            "truncate": False,
        },
    ],
)
def test_rope_agrees_with_transformers(scaling: dict[str, Any] | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 50000.0, **(scaling or {"rope_type": "default"})}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=262144,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    frequencies, magnitude = rotary_frequencies(64, 50000.0, scaling)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.double().numpy(), rtol=2e-6)
    assert magnitude == pytest.approx(theirs.attention_scaling)


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(DataError, match="longrope"):
        rotary_frequencies(8, 1e4, {"rope_type": "longrope"})
    with pytest.raises(DataError, match="does not say factor"):
        rotary_frequencies(8, 1e4, {"rope_type": "yarn", "original_max_position_embeddings": 64})


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    make.write(tmp_path)
    read = read_eagle3(tmp_path)
    good = ReferenceDrafter(read, make.embedding()).unroll(TOKENS, aux_states(), 2)
    assert require_agreement(good, [s.clone() for s in good], 1e-6) == 0.0
    read.weights["midlayer.self_attn.k_proj.weight"].mul_(1.05)
    changed = ReferenceDrafter(read, make.embedding()).unroll(TOKENS, aux_states(), 2)
    assert largest_difference(good, changed) > 1e-3
    with pytest.raises(ExportMismatch, match="does not compute"):
        require_agreement(good, changed, 1e-3)


def test_what_cannot_be_compared_is_refused() -> None:
    one = torch.ones(2, 3)
    with pytest.raises(ExportMismatch, match="another shape"):
        largest_difference([one], [one, one])
    with pytest.raises(ExportMismatch, match="not finite"):
        largest_difference([one], [one * float("nan")])


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    make.write(tmp_path)
    read = read_eagle3(tmp_path)
    read.missing.append("norm.weight")
    with pytest.raises(ExportMismatch, match="missing"):
        ReferenceDrafter(read, make.embedding())
