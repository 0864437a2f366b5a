"""Layer ids, translated for each engine and back, against each engine's rule written out anew."""

from __future__ import annotations

from itertools import combinations

import pytest

from eyas.config.engine_layers import IDS_KEY, engine_layer_ids, layers_in_sglang, layers_in_vllm
from eyas.export.engines import sglang_command, vllm_command
from tests.export import make


def captured_by_sglang(ids: list[int] | None, num_layers: int, deepseek: bool) -> list[int]:
    """SGLang's rule: which residual streams, counted after k layers, a model of this kind keeps."""
    if ids is None:
        wanted = [2, num_layers // 2, num_layers - 3]
    elif deepseek:
        wanted = [i + 1 for i in ids] if ids[0] == 1 else ids
    else:
        wanted = [i + 1 for i in ids]
    return [k for k in range(num_layers) if k in wanted]


@pytest.mark.parametrize(
    ("model_type", "deepseek"),
    [("llama", False), ("qwen3", False), ("kimi_k25", True), ("deepseek_v3", True)],
)
def test_both_engines_capture_what_was_trained(model_type: str, deepseek: bool) -> None:
    target = make.facts(model_type=model_type)
    for layers in combinations(range(1, 12), 3):
        ids = engine_layer_ids(layers, target)
        assert not ids.caveats
        nested = None if ids.sglang is None else list(ids.sglang)
        assert captured_by_sglang(nested, 12, deepseek) == list(layers)
        top = list(ids.vllm) if ids.vllm else [2, 6, 9]
        assert sorted(set(top)) == list(layers)
        config: dict[str, object] = {"eagle_config": {}}
        if ids.vllm and ids.sglang:
            config = {IDS_KEY: list(ids.vllm), "eagle_config": {IDS_KEY: list(ids.sglang)}}
        assert layers_in_vllm(config, 12) == layers
        assert layers_in_sglang(config, 12, model_type) == layers


def test_ids_measured_for_a_model_of_30_layers() -> None:
    target = make.facts(num_layers=30)
    assert engine_layer_ids((2, 15, 27), target).vllm is None
    config = {"eagle_config": {IDS_KEY: [1, 14, 26]}}
    assert layers_in_sglang(config, 30, "llama") == (2, 15, 27)
    assert layers_in_vllm(config, 30) == (1, 14, 26)
    assert layers_in_sglang(config, 30, "deepseek_v3") == (2, 15, 27)


def test_what_sglang_cannot_capture_is_said() -> None:
    assert "embeddings" in engine_layer_ids((0, 6, 9), make.facts()).caveats[0]
    assert "final norm" in engine_layer_ids((2, 6, 12), make.facts()).caveats[0]
    assert "alone" in engine_layer_ids((1,), make.facts(model_type="deepseek_v3")).caveats[0]


def test_commands_are_safe_to_paste() -> None:
    assert "--speculative-num-steps 3" in sglang_command("/m", "/d", 3)
    assert "--speculative-num-draft-tokens 4" in sglang_command("/m", "/d", 3)
    assert '"num_speculative_tokens":5' in vllm_command("/m", "/d", 5)
    assert "'/a b'" in sglang_command("/a b", "/d", 3)
