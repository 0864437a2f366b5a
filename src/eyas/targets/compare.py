"""Whether two captures of the same tokens are the same states, up to arithmetic."""

from __future__ import annotations

import torch

TOLERANCE = 0.1
"""Largest relative Frobenius error. Measured across engines: the right layer stays below 0.07, its
neighbours lie above 0.13."""
FIRST_ROW = 4
"""Rows before it carry massive activations that would hide a wrong layer."""
TIE_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest gap of two logits of one process that counts as a tie, by arithmetic of the target."""
_ROUNDING = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-18,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-9,
}
"""Share of the largest logit by which an engine's own rounding may move one, by arithmetic."""


def engine_tie_gap(dtype: torch.dtype, largest_logit: float) -> float:
    """Largest gap of two logits that counts as a tie between an engine's arithmetic and ours.

    Measured on SmolLM2 in bfloat16: one logit moves by 0.09 in the mean and by up to 0.6 when the same row
    is computed in another shape, at logits of up to 43, where neighbouring bfloat16 numbers lie 0.25 apart.
    """
    return TIE_GAPS[dtype] + _ROUNDING[dtype] * largest_logit


def relative_error(found: torch.Tensor, stored: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is stored, first rows left out if others remain."""
    if len(stored) > FIRST_ROW + 4:
        found, stored = found[FIRST_ROW:], stored[FIRST_ROW:]
    wide = stored.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))
