"""The arithmetic of what must not be narrow: sums, exponentials, angles, norms and master weights."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 beside float64, float32 beside everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
