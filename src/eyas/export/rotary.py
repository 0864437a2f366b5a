"""Rotary positions as the engines compute them from ``config.json``; no torch.

Plain and linear rope, the frequency bands of Llama 3.1, and YaRN (Peng et al. 2023, arXiv:2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from eyas.base.errors import DataError

KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rotary_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
    """Angle per position of each pair of channels, [head_dim / 2], and the factor on cos and sin.

    Args:
        scaling: a rope scaling table with ``rope_type``; None is plain rope.

    Raises:
        DataError: a kind of scaling that is not known here, or one that lacks a number.
    """
    base = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if scaling is None or kind == "default":
        return base, 1.0
    try:
        if kind == "linear":
            return base / float(scaling["factor"]), 1.0
        if kind == "llama3":
            return _llama3(base, scaling), 1.0
        if kind == "yarn":
            return _yarn(base, head_dim, theta, scaling), _yarn_magnitude(scaling)
    except KeyError as error:
        raise DataError(f"rope scaling {kind!r} does not say {error.args[0]}") from error
    raise DataError(
        f"rope scaling {kind!r} is not known to the reference forward",
        why=f"known are {', '.join(KNOWN_ROPE_TYPES)}",
    )


def _llama3(
    base: np.ndarray[Any, np.dtype[np.float64]], scaling: Mapping[str, Any]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * base / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(kept * base + (1 - kept) * base / float(scaling["factor"]))


def _yarn(
    base: np.ndarray[Any, np.dtype[np.float64]], head_dim: int, theta: float, scaling: Mapping[str, Any]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    positions = float(scaling["original_max_position_embeddings"])

    def channel_with(turns: float) -> float:
        return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel_with(float(scaling.get("beta_fast") or 32))
    high = channel_with(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return np.asarray(base * (1 - ramp) + base / float(scaling["factor"]) * ramp)


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(float(over)) / magnitude(float(under)) if over and under else magnitude(1.0)
