"""Rotary positions in the rotate-half convention of Llama, with the scalings that targets use.

Su et al., RoFormer (2021); YaRN: Peng et al. (2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.base.errors import ConfigError
from eyas.drafter.kernels.compiled import kernels_for

SUPPORTED = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[Tensor, float]:
    """Angle per position of each pair of a head, and the factor on cosine and sine.

    Args:
        scaling: ``rope_scaling`` of a configuration, with ``rope_type`` or the older ``type``.
        max_positions: used by YaRN where the scaling does not name the original length.

    Returns:
        float64 ``[head_dim / 2]`` and the attention factor (1 but for YaRN).

    Raises:
        ConfigError: the scaling's kind is unknown or a field of it is missing.
    """
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = "default" if not scaling else str(scaling.get("rope_type") or scaling.get("type") or "default")
    try:
        if not scaling or kind == "default":
            return plain, 1.0
        if kind == "linear":
            return plain / float(scaling["factor"]), 1.0
        if kind == "llama3":
            return _llama3(plain, scaling), 1.0
        if kind == "yarn":
            return _yarn(plain, head_dim, theta, scaling, max_positions)
    except KeyError as error:
        raise ConfigError(f"rope scaling {kind!r} does not say {error.args[0]}") from error
    raise ConfigError(f"rope scaling {kind!r} is none of {', '.join(SUPPORTED)}")


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    turns = original * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


def _yarn(
    plain: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    factor = float(scaling["factor"])
    original = float(scaling.get("original_max_position_embeddings") or max_positions)

    def pair_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_of(float(scaling.get("beta_fast") or 32))
    last = pair_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / span).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(float(mscale)) / magnitude(float(mscale_all))
    return magnitude(1.0)


class RotaryPositions:
    """Turns queries and keys; holds no weights.

    Angles are computed in float64, so that position 100,000 is as exact as position 1.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
    ) -> None:
        self._frequencies, self._factor = inverse_frequencies(head_dim, theta, scaling, max_positions)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each ``[..., head_dim / 2]``, for integer positions ``[...]``."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angle = positions.to(torch.float64).unsqueeze(-1) * self._frequencies
        return (angle.cos() * self._factor).to(dtype), (angle.sin() * self._factor).to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn ``x [..., heads, D]`` by angles ``[..., D / 2]``: pair i is (x[i], x[i + D/2]).

    Turned in the arithmetic of the angles, returned in that of ``x``.
    """
    turned: Tensor = _Rotate.apply(x, cosine, sine)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """Its gradient is the turn by the opposite angle, which needs nothing of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(x, cosine, sine, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(gradients[0], cosine, sine, back=True), None, None


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool) -> Tensor:
    kernels = kernels_for(x)
    if kernels is not None and x.ndim == 3 and cosine.shape == (len(x), x.shape[2] // 2):
        if x.stride()[1:] != (x.shape[2], 1):
            x = x.contiguous()
        return kernels.turn(x, cosine.float().contiguous(), sine.float().contiguous(), back=back)
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    if back:
        sine = -sine
    wide = x.to(cosine.dtype)
    first, second = wide.chunk(2, dim=-1)
    output = torch.empty_like(wide)
    turned_first, turned_second = output.chunk(2, dim=-1)
    torch.mul(first, cosine, out=turned_first).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=turned_second).addcmul_(first, sine)
    return output.to(x.dtype)
