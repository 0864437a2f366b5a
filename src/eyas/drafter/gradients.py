"""Norms of gradients: of each module for the metrics, and of all for clipping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

_LAYER = "midlayer"


@dataclass(frozen=True)
class GradientNorms:
    """2-norms before clipping: of everything, and of each module by its name."""

    total: float
    by_module: dict[str, float]


def module_of(name: str) -> str:
    """The module that a parameter's norm is counted in: ``fc``, ``midlayer.mlp``, ``lm_head``, ..."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == _LAYER else 1])


def measure_and_clip(named_parameters: Iterable[tuple[str, Tensor]], limit: float) -> GradientNorms:
    """Scale gradients down to a total norm of ``limit``, if they are larger; the norms they had before.

    One that is not finite leaves gradients that must not be used.
    """
    modules: dict[str, list[Tensor]] = {}
    for name, parameter in named_parameters:
        if parameter.grad is not None:
            modules.setdefault(module_of(name), []).append(parameter)
    if not modules:
        return GradientNorms(0.0, {})
    norms = {module: _norm(parameters) for module, parameters in modules.items()}
    total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
    clip_grads_with_norm_([p for parameters in modules.values() for p in parameters], limit, total)
    whole, *parts = torch.stack([total, *norms.values()]).tolist()
    return GradientNorms(whole, dict(zip(norms, parts, strict=True)))


def _norm(parameters: list[Tensor]) -> Tensor:
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    whole = getattr(norm, "full_tensor", None)  # of gradients that lie in several processes
    return norm if whole is None else whole()
