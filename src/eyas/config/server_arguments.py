"""Arguments of a server that follow from the configuration, by engine and mode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eyas.base.errors import ConfigError
from eyas.config.engine_layers import engine_layer_ids
from eyas.config.resolve import Resolved
from eyas.config.schema import EyasConfig

Mode = Literal["generate", "capture", "draft"]
"""What a server is for: to answer prompts, to capture states, or to serve an exported drafter."""

Engine = Literal["vllm", "sglang"]

MODES: tuple[Mode, ...] = ("generate", "capture", "draft")

_OWN = {
    "vllm": ("model", "host", "port", "speculative-config", "kv-transfer-config"),
    "sglang": (
        "model-path",
        "host",
        "port",
        "speculative-algorithm",
        "speculative-draft-model-path",
        "enable-return-aux-hidden-states",
        "return-aux-hidden-state-layer-ids",
    ),
}
"""Arguments that decide what a server is; a table that sets them would not be what eyas proves."""


def engine_of(config: EyasConfig) -> Engine:
    """The engine that serves this project."""
    if config.serve.engine != "auto":
        return config.serve.engine
    return "vllm" if config.target.kind == "local" else config.target.kind


def mode_arguments(
    config: EyasConfig, resolved: Resolved, mode: Mode, drafter: Path | None = None
) -> dict[str, Any]:
    """Arguments by name, the free tables laid over what is derived; address and dump folder are left out.

    Args:
        drafter: the exported drafter, in mode ``draft``.

    Raises:
        ConfigError: a table sets what eyas decides, or the layers cannot be captured by the engine.
    """
    engine = engine_of(config)
    derived = _common(config, resolved, engine, mode)
    if mode == "capture":
        derived |= _capture(resolved, engine)
    elif mode == "draft":
        derived |= _draft(config, engine, drafter)
    for table_name in ("args", f"args_{mode}"):
        for key, value in getattr(config.serve, table_name).items():
            name = key.lstrip("-").replace("_", "-")
            if name in _OWN[engine]:
                raise ConfigError(
                    f"serve.{table_name} sets {name}, which eyas decides",
                    where="eyas.toml",
                    hint=f"remove {key} from serve.{table_name}",
                )
            derived[name] = value
    return derived


def words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as a command line has them."""
    line: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        line.append(f"--{name}")
        if value is not True:
            line += [_word(entry) for entry in (value if isinstance(value, list) else [value])]
    return line


def _word(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)


def _common(config: EyasConfig, resolved: Resolved, engine: Engine, mode: Mode) -> dict[str, Any]:
    # a server that captures must be asked for one token more than it is given
    length = config.data.max_seq_len + (1 if mode == "capture" else 0)
    length = min(length, max(resolved.facts.max_position_embeddings, config.data.max_seq_len))
    arguments: dict[str, Any] = {"model" if engine == "vllm" else "model-path": str(resolved.model)}
    if config.target.dtype != "auto":
        arguments["dtype"] = config.target.dtype
    if config.target.trust_remote_code:
        arguments["trust-remote-code"] = True
    arguments["max-model-len" if engine == "vllm" else "context-length"] = length
    return arguments


def _capture(resolved: Resolved, engine: Engine) -> dict[str, Any]:
    layers, num_layers = list(resolved.aux_layers), resolved.facts.num_layers
    if engine == "vllm":
        ids = sorted({*layers, num_layers})
        return {
            "no-enable-prefix-caching": True,
            "speculative-config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
        }
    spoken = engine_layer_ids(layers, resolved.facts)
    if spoken.caveats:
        raise ConfigError(
            f"extract.aux_layers {layers} cannot be captured by SGLang",
            where="eyas.toml",
            why="; ".join(spoken.caveats),
            hint="set extract.aux_layers to auto, or serve with vLLM",
        )
    arguments: dict[str, Any] = {
        "enable-return-aux-hidden-states": True,
        "speculative-algorithm": "EAGLE3",
        "disable-radix-cache": True,
    }
    if spoken.sglang is not None:
        arguments["return-aux-hidden-state-layer-ids"] = list(spoken.sglang)
    return arguments


def _draft(config: EyasConfig, engine: Engine, drafter: Path | None) -> dict[str, Any]:
    num, place = config.evaluate.num_drafts, str(drafter) if drafter is not None else "EXPORT"
    if engine == "vllm":
        return {"speculative-config": {"method": "eagle3", "model": place, "num_speculative_tokens": num}}
    return {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": place,
        "speculative-num-steps": num,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": num + 1,
    }
