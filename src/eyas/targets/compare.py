"""Whether two captures of the same tokens are the same states, up to arithmetic."""

from __future__ import annotations

import torch

TOLERANCE = 0.1
"""Largest relative Frobenius error. Measured across engines: the right layer stays below 0.07, its
neighbours lie above 0.13."""
FIRST_ROW = 4
"""Rows before it carry massive activations that would hide a wrong layer."""
TIE_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest gap of two logits that rounding can turn around, by arithmetic of the target."""


def relative_error(found: torch.Tensor, stored: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is stored, first rows left out if others remain."""
    if len(stored) > FIRST_ROW + 4:
        found, stored = found[FIRST_ROW:], stored[FIRST_ROW:]
    wide = stored.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))
