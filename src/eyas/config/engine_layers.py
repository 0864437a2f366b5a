"""How each engine reads layer ids.

eyas counts "after k layers": 0 is the embeddings, n the state before the final norm. vLLM counts the
same way and reads the top level of config.json first. SGLang reads ``eagle_config`` only, and counts
by the kind of target: most of its models take the layer whose *output* is captured (k - 1), its
DeepSeek-type ones take k itself unless the first id is 1, which adds one to all. Because the two look
in different places, one folder can tell each engine in its own words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.base.errors import ConfigError
from eyas.config.target_facts import TargetFacts

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
"""Name of the list in config.json: at the top level for vLLM, within ``eagle_config`` for SGLang."""

SGLANG_COUNTS_INPUTS = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "kimi_k25",
    }
)
"""Target ``model_type``s whose SGLang model takes ids as "after k layers"."""


@dataclass(frozen=True)
class EngineLayerIds:
    """What config.json has to say so that both engines capture the layers that were trained on.

    ``vllm`` and ``sglang`` are None when nothing has to be said: three layers at both engines'
    default. ``caveats`` names what an engine cannot do; such an export fails loudly there.
    """

    vllm: tuple[int, ...] | None
    sglang: tuple[int, ...] | None
    caveats: tuple[str, ...] = ()


def engine_default(num_layers: int) -> tuple[int, int, int]:
    """The layers both engines capture when no ids are given, as "after k layers"."""
    return (2, num_layers // 2, num_layers - 3)


def check_aux_layers(aux_layers: Sequence[int], num_layers: int) -> None:
    """Refuse layers that no engine would hand over in this order.

    Raises:
        ConfigError: not ascending and distinct, or outside 0..num_layers.
    """
    layers = list(aux_layers)
    if not layers or layers != sorted(set(layers)):
        raise ConfigError(
            f"aux layers {layers} are not ascending and distinct",
            where="extract.aux_layers",
            why="engines hand captured layers over in the order of the layers, each once",
        )
    if layers[0] < 0 or layers[-1] > num_layers:
        raise ConfigError(
            f"aux layers {layers} lie outside 0..{num_layers}",
            where="extract.aux_layers",
            why=f"the target has {num_layers} layers",
        )


def engine_layer_ids(aux_layers: Sequence[int], target: TargetFacts) -> EngineLayerIds:
    """Translate trained layers into each engine's own ids.

    Args:
        aux_layers: "after k layers", ascending.
        target: tells the number of layers and the kind of model.

    Raises:
        ConfigError: as `check_aux_layers`.
    """
    layers = tuple(int(k) for k in aux_layers)
    check_aux_layers(layers, target.num_layers)
    if layers == engine_default(target.num_layers):
        return EngineLayerIds(None, None)
    caveats = []
    if layers[0] == 0:
        caveats.append("SGLang cannot capture the embeddings (layer 0)")
    if layers[-1] == target.num_layers:
        caveats.append(f"SGLang cannot capture the state before the final norm (layer {layers[-1]})")
    return EngineLayerIds(layers, _to_sglang(layers, target.model_type, caveats), tuple(caveats))


def explicit_layer_ids(aux_layers: Sequence[int], target: TargetFacts) -> dict[str, list[int]]:
    """Trained layers in the count of ``vllm`` and of ``sglang``, also where they are the default.

    Raises:
        ConfigError: as `check_aux_layers`.
    """
    layers = tuple(int(k) for k in aux_layers)
    check_aux_layers(layers, target.num_layers)
    return {"vllm": list(layers), "sglang": list(_to_sglang(layers, target.model_type, []))}


def _to_sglang(layers: tuple[int, ...], model_type: str, caveats: list[str]) -> tuple[int, ...]:
    if model_type not in SGLANG_COUNTS_INPUTS:
        return tuple(k - 1 for k in layers)
    if layers[0] != 1:
        return layers
    if len(layers) == 1:
        caveats.append("SGLang cannot capture layer 1 alone of this kind of target")
        return layers
    # A first id of 1 would add one to all. The list is only used to ask "is this layer in it", so
    # another order says the same and escapes that rule.
    return (*layers[1:], 1)


def layers_in_vllm(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers ("after k layers") that vLLM captures for a drafter with this config.json."""
    nested = config.get("eagle_config")
    ids = config.get(IDS_KEY) or (nested.get(IDS_KEY) if isinstance(nested, Mapping) else None)
    return tuple(sorted({int(i) for i in ids})) if ids else engine_default(num_layers)


def layers_in_sglang(config: Mapping[str, Any], num_layers: int, model_type: str) -> tuple[int, ...]:
    """The layers ("after k layers") that SGLang captures for a drafter with this config.json."""
    nested = config.get("eagle_config")
    ids = nested.get(IDS_KEY) if isinstance(nested, Mapping) else None
    if ids is None:
        return engine_default(num_layers)
    shifted = model_type not in SGLANG_COUNTS_INPUTS or (ids and int(ids[0]) == 1)
    return tuple(sorted({int(i) + (1 if shifted else 0) for i in ids}))
