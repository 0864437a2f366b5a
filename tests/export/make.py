"""Small exports to test with: weights that look trained, a mapping, and the facts of their target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.config.target_facts import TargetFacts
from eyas.export.dimensions import expected_shapes, read_dimensions
from eyas.export.layout import eagle3_config, write_eagle3

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 32, 96, 40, 12


def facts(**changes: Any) -> TargetFacts:
    """A Llama-like target of 12 layers; its default aux layers are 2, 6 and 9."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "vocab_size": VOCAB,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "end_tokens": (2,),
        "dtype": "bfloat16",
    }
    return TargetFacts(**{**values, **changes})


def shape(**changes: Any) -> dict[str, Any]:
    """The fields of a DrafterShape that fits `facts`."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "num_aux": 3,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "norms": "eagle3",
    }
    return {**values, **changes}


def target_head(seed: int = 5, vocab: int = VOCAB, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(seed)) * 0.1


def embedding(seed: int = 6, vocab: int = VOCAB, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(seed)) * 0.1


def mapping(sizes: dict[str, Any], seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t, t2d) of a sorted mapping that holds ids 0 to 3."""
    num_draft, num_target = sizes["draft_vocab_size"], sizes["target_vocab_size"]
    rest = torch.randperm(num_target - 4, generator=torch.Generator().manual_seed(seed))[: num_draft - 4] + 4
    ids = torch.cat([torch.arange(4), rest]).sort().values
    mask = torch.zeros(num_target, dtype=torch.bool)
    mask[ids] = True
    return ids - torch.arange(num_draft), mask


def weights(
    sizes: dict[str, Any], aux_layers: tuple[int, ...], target: TargetFacts, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Weights with norms away from 1, rows of different scale, and a head near the target's."""
    generator = torch.Generator().manual_seed(seed)
    config = eagle3_config(sizes, aux_layers, target, "float32")
    made = {}
    for name, size in expected_shapes(read_dimensions(config)).items():
        noise = torch.randn(size, generator=generator)
        made[name] = (
            1 + 0.1 * noise
            if len(size) == 1
            else 0.1 * noise * (1 + torch.rand(size[0], 1, generator=generator))
        )
    ids = torch.arange(sizes["draft_vocab_size"]) + mapping(sizes)[0]
    head = target_head(vocab=sizes["target_vocab_size"], hidden=sizes["hidden_size"])
    made["lm_head.weight"] = head[ids] + 0.02 * torch.randn(made["lm_head.weight"].shape, generator=generator)
    return made


def write(
    folder: Path,
    *,
    aux_layers: tuple[int, ...] = (2, 6, 9),
    target: TargetFacts | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write a good export; returns the weights that went in."""
    target = target or facts()
    sizes = shape(**changes)
    made = weights(sizes, aux_layers, target)
    folder.mkdir(parents=True, exist_ok=True)
    write_eagle3(folder, made, sizes, *mapping(sizes), aux_layers, target, dtype)
    return made
