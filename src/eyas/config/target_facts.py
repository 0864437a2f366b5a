"""Sizes of a target, read from its ``config.json`` without loading anything else."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import TargetError


@dataclass(frozen=True)
class TargetFacts:
    """What a target's configuration says of it.

    ``num_layers`` counts decoder layers; ``end_tokens`` are all ids that end an answer;
    ``rope_theta`` and ``rope_scaling`` are as the target's config gives them.
    """

    model_type: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    end_tokens: tuple[int, ...]
    dtype: str

    def default_aux_layers(self) -> tuple[int, ...]:
        """2, n//2 and n-3 in the "after k layers" sense, as both engines take without being told.

        A model of fewer than six layers gets distinct layers spread over its depth.
        """
        n = self.num_layers
        picked = (2, n // 2, n - 3)
        if 0 < picked[0] < picked[1] < picked[2]:
            return picked
        return tuple(sorted({max(0, n // 4), n // 2, max(0, n - 1)}))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""What some kinds of model call the same sizes."""


def read_target_facts(model: Path) -> TargetFacts:
    """Read ``config.json`` (and ``generation_config.json``) of a model folder.

    Sizes that sit in a nested ``text_config`` are found there.

    Raises:
        TargetError: there is no configuration, or it lacks a size.
    """
    path = model / "config.json"
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TargetError(
            "the target has no config.json",
            where=model,
            hint="set target.model to a folder that holds config.json, a tokenizer and safetensors",
        ) from error
    except (OSError, ValueError) as error:
        raise TargetError("the target's config.json cannot be read", where=path, why=str(error)) from error
    inner = outer
    if not any(name in outer for name in ("hidden_size", *_OTHER_NAMES["hidden_size"])):
        nested = [v for v in outer.values() if isinstance(v, dict) and "hidden_size" in v]
        inner = outer.get("text_config") or (nested[0] if len(nested) == 1 else outer)

    def get(key: str, default: Any = None) -> Any:
        for name in (key, *_OTHER_NAMES.get(key, ())):
            value = inner.get(name, outer.get(name))
            if value is not None:
                return value
        return default

    missing = [
        k for k in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads") if not get(k)
    ]
    if missing:
        raise TargetError(
            f"the target's config.json does not say {', '.join(missing)}",
            where=path,
            why="eyas reads sizes from the top level or from text_config",
        )
    hidden, heads = int(get("hidden_size")), int(get("num_attention_heads"))
    parameters = get("rope_parameters") or {}
    scaling = get("rope_scaling") or (
        {} if parameters.get("rope_type", "default") == "default" else parameters
    )
    return TargetFacts(
        model_type=str(get("model_type", "unknown")),
        architecture=str((outer.get("architectures") or ["unknown"])[0]),
        hidden_size=hidden,
        num_layers=int(get("num_hidden_layers")),
        vocab_size=int(get("vocab_size")),
        num_heads=heads,
        num_kv_heads=int(get("num_key_value_heads", heads)),
        head_dim=int(get("head_dim", hidden // heads)),
        intermediate_size=int(get("intermediate_size", 4 * hidden)),
        rms_norm_eps=float(get("rms_norm_eps", get("layer_norm_eps", 1e-6))),
        max_position_embeddings=int(get("max_position_embeddings", 2048)),
        rope_theta=float(get("rope_theta", parameters.get("rope_theta", 10000.0))),
        rope_scaling=dict(scaling) or None,
        tie_word_embeddings=bool(outer.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
        end_tokens=_end_tokens(model, get("eos_token_id")),
        dtype=str(get("dtype", get("torch_dtype", "bfloat16"))),
    )


def _end_tokens(model: Path, configured: Any) -> tuple[int, ...]:
    found: list[int] = []
    sources = [configured]
    with contextlib.suppress(OSError, ValueError):  # an optional file
        sources.append(
            json.loads((model / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
        )
    for value in sources:
        for token in value if isinstance(value, list) else [value]:
            if token is not None and int(token) not in found:
                found.append(int(token))
    return tuple(found)
