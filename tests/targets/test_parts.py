"""Embedding, norm and head out of checkpoints of several shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.base.errors import TargetError
from eyas.targets.local.model import LocalTarget
from eyas.targets.parts import load_parts
from tests.tiny import save_tiny_target


@pytest.mark.parametrize(
    ("kind", "tied", "shard"),
    [
        ("llama", True, None),
        ("llama", False, None),
        ("llama", False, 40),
        ("qwen3", False, None),
        ("deepseek_v3", False, None),
        ("nested", False, None),
        ("nested", True, None),
        ("sliding", True, None),
        ("recurrent", False, None),
    ],
)
def test_parts_compute_what_the_model_computes(
    tmp_path: Path, kind: str, tied: bool, shard: int | None
) -> None:
    save_tiny_target(tmp_path, kind, tie_word_embeddings=tied, max_shard_kilobytes=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard is not None)
    target = LocalTarget.load(tmp_path)
    parts = load_parts(tmp_path)
    assert parts.tied == tied
    ids = [3, 14, 15, 92, 65]
    states = target.capture([ids], [0, target.facts.num_layers])[0]
    with torch.no_grad():
        logits = target.model(torch.tensor([ids]), use_cache=False).logits[0]
    # embedding rows are the stream before the first layer, the norm leads from the last layer to the head
    torch.testing.assert_close(parts.embedding[ids] * parts.embedding_scale, states.aux[:, 0])
    deep = states.aux[:, 1]
    normed = deep * torch.rsqrt(deep.pow(2).mean(-1, keepdim=True) + parts.norm_eps) * parts.norm_weight
    torch.testing.assert_close(normed, states.last, rtol=1e-4, atol=1e-5)
    found = normed @ parts.head.T
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def test_sharded_reads_from_several_files(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, "qwen3", max_shard_kilobytes=60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["lm_head.weight"] != index["model.norm.weight"]
    parts = load_parts(tmp_path, dtype=torch.float64)
    assert parts.head.dtype == torch.float64
    stored = load_file(tmp_path / index["lm_head.weight"])["lm_head.weight"]
    assert torch.equal(parts.head.float(), stored)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_what_is_refused(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, "qwen3")
    rewrite(
        tmp_path,
        lambda t: t.update({"vision_tower.norm.weight": torch.ones(9), "mtp.norm.weight": torch.ones(9)}),
    )
    load_parts(tmp_path)  # parts of other towers are not confused with the model's
    rewrite(tmp_path, lambda t: t.update({"second.lm_head.weight": torch.ones(336, 64)}))
    with pytest.raises(TargetError, match="head is ambiguous") as ambiguous:
        load_parts(tmp_path)
    assert "second.lm_head.weight" in str(ambiguous.value.why)
    rewrite(
        tmp_path, lambda t: [t.pop("second.lm_head.weight"), t.update({"lm_head.weight": torch.ones(10, 64)})]
    )
    with pytest.raises(TargetError, match="another shape"):
        load_parts(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(336, 64, dtype=torch.int8)}))
    with pytest.raises(TargetError, match="quantized"):
        load_parts(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(TargetError, match="no head"):
        load_parts(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(TargetError, match="embedding was not found"):
        load_parts(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(TargetError, match="cannot be read"):
        load_parts(tmp_path)
