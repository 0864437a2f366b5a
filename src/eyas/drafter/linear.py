"""Small linear algebra that several starts of a drafter share."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge(gram: Tensor, cross: Tensor, strength: float) -> Tensor:
    """Ridge regression from normal equations: ``[n, m]`` weights of outputs on inputs.

    Args:
        gram: ``[n, n]`` mean of input products, float64.
        cross: ``[n, m]`` mean of products of inputs and outputs.
        strength: penalty as a share of each input's own mean square, so that the fit is blind to scales.
    """
    scale = gram.diagonal().sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled = gram / scale / scale.unsqueeze(1)
    scaled.diagonal().add_(strength)
    solution = torch.cholesky_solve(cross / scale.unsqueeze(1), torch.linalg.cholesky(scaled))
    return solution / scale.unsqueeze(1)


def away_from_zero(weight: Tensor) -> Tensor:
    """A norm's weight with tiny entries lifted, so that states can be divided by it."""
    tiny = 1e-6
    return torch.where(weight.abs() < tiny, torch.full_like(weight, tiny), weight)
