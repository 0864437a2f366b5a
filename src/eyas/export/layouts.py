"""Layouts of an export: which engines load each, and how speculators' configuration is read; no torch.

``both`` is one folder for SGLang and vLLM. ``sglang`` and ``vllm`` say one engine's conventions only, each
of them in words. ``speculators`` is the layout of the library of that name, which vLLM loads too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eyas.base.errors import DataError
from eyas.config.engine_layers import IDS_KEY
from eyas.config.target_facts import TargetFacts
from eyas.export.dimensions import ARCHITECTURE

Layout = Literal["both", "sglang", "vllm", "speculators"]
FURTHER_LAYOUTS: tuple[Layout, ...] = ("sglang", "vllm", "speculators")
"""What is written beside the common folder when it is asked for."""
LAYOUT_METADATA = "eyas.layout"
"""Key in the weight file's metadata."""
_ENGINES: dict[str, tuple[str, ...]] = {
    "both": ("vLLM", "SGLang"),
    "sglang": ("SGLang",),
    "vllm": ("vLLM",),
    "speculators": ("vLLM",),
}
_MODEL_TYPE = "speculators_model_type"
_LAYER_CONFIG = "transformer_layer_config"
_SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
_SPECULATORS_VERSION = "0.9.0"
_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}
"""What transformers' classes of these kinds assume: speculators writes only what differs from it."""


def engines_of(layout: str) -> tuple[str, ...]:
    """Engines that a layout is for."""
    return _ENGINES.get(layout, _ENGINES["both"])


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is in speculators' layout."""
    return _MODEL_TYPE in config or _LAYER_CONFIG in config


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Speculators' configuration in the words of the common layout, with its own defaults said.

    A missing ``norm_before_residual`` is true, as vLLM reads this layout.

    Raises:
        DataError: it is no EAGLE-3 drafter, or its layer is of a kind that is not known here.
    """
    kind = config.get(_MODEL_TYPE)
    layer = config.get(_LAYER_CONFIG)
    if kind != "eagle3" or not isinstance(layer, Mapping):
        raise DataError(
            f"a drafter of speculators' kind {kind!r} is not known here",
            why="only eagle3 with a transformer_layer_config is",
        )
    base = _LAYER_DEFAULTS.get(str(layer.get("model_type", "qwen3")))
    if base is None:
        raise DataError(f"a drafter whose layer is of kind {layer.get('model_type')!r} is not known here")
    names = config.get("architectures")
    known = isinstance(names, list) and names and names[0] in _SPECULATORS_ARCHITECTURES
    flat = {
        **base,
        **layer,
        "architectures": [ARCHITECTURE] if known else names,
        "draft_vocab_size": config.get("draft_vocab_size", 32000),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_before_residual": config.get("norm_before_residual", True),
        **{flag: bool(config.get(flag, False)) for flag in ("norm_before_fc", "fc_norm", "norm_output")},
    }
    for key in ("target_hidden_size", IDS_KEY, "dtype", "torch_dtype"):
        if config.get(key) is not None:
            flat[key] = config[key]
    return flat


def for_one_engine(config: Mapping[str, Any], layout: Layout, ids: Mapping[str, list[int]]) -> dict[str, Any]:
    """A configuration of the common layout as it stands in a folder for one engine.

    Args:
        ids: layers in the count of ``vllm`` and ``sglang``.
    """
    nested = dict(config["eagle_config"])
    changed = {key: value for key, value in config.items() if key != IDS_KEY}
    if layout == "sglang":
        return {**changed, "eagle_config": {**nested, IDS_KEY: ids["sglang"]}}
    return {**changed, "eagle_config": {**nested, IDS_KEY: ids["vllm"]}, IDS_KEY: ids["vllm"]}


def as_speculators(
    config: Mapping[str, Any], target: TargetFacts, target_path: str, num_drafts: int, ids: list[int]
) -> dict[str, Any]:
    """A configuration of the common layout in speculators' words.

    Args:
        target_path: under which speculators finds the target.
        num_drafts: drafts that it proposes when it is not told.
        ids: trained layers, "after k layers", which is speculators' count too.
    """
    layer_keys = (
        "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rms_norm_eps", "vocab_size",
        "max_position_embeddings", "rope_theta", "rope_parameters", "tie_word_embeddings",
    )  # fmt: skip
    layer = {"model_type": "llama", **{key: config[key] for key in layer_keys}}
    if config.get("rope_scaling"):
        layer["rope_scaling"] = config["rope_scaling"]
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [_SPECULATORS_ARCHITECTURES[0]],
        _MODEL_TYPE: "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": [target.architecture], "name_or_path": target_path},
        },
        _LAYER_CONFIG: layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        IDS_KEY: ids,
        **{
            flag: config[flag]
            for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
        },
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
        "dtype": config["dtype"],
    }
