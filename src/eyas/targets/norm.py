"""The target's final norm as a function: what an engine gives before it is brought to what the head takes."""

from __future__ import annotations

import torch


def final_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` for each row, computed in float32.

    Args:
        states: [rows, H] before the final norm.
        weight: [H], the factor that the norm multiplies with (see `eyas.targets.parts.TargetParts`).

    Returns:
        [rows, H] in float32.
    """
    x = states.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
