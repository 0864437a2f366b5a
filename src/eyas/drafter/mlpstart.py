"""An MLP that begins as the best correction of what the rest of the layer says.

Gate and up rows begin as random directions of the normed input, and ``down`` is fitted in closed form: by
ridge regression of the target's next last state, less what feature and attention already give, on the
MLP's inner activations. Rows of several draft steps are fitted together. A row of step 0 carries a feature
made from aux states; one of a later step carries the layer's own last output, which says what the token
before was and has to be turned into the next guess: no single linear map serves both, random activations
tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.drafter.batch import TrainingSample, pack
from eyas.drafter.linear import away_from_zero, ridge
from eyas.drafter.model import EagleDrafter

STEPS = 2
"""Draft steps that the fit looks at; later ones see inputs like those of the second."""
RIDGE = 1e-2
"""Strength of the ridge, as a share of each activation's own mean square."""


def start_mlp(
    drafter: EagleDrafter,
    samples: Iterable[TrainingSample],
    norm_weight: Tensor,
    *,
    gamma: float,
    seed: int,
    steps: int = STEPS,
    max_rows: int,
) -> int:
    """Draw gate and up, fit ``down``; the rows of step 0 looked at.

    Args:
        samples: read until ``max_rows`` rows of step 0 were looked at.
        norm_weight: ``[H]`` of the target's final norm; last states divided by it are what the layer's
            output should be.
        gamma: a row of step j counts gamma^j.
        seed: decides the directions of gate and up.
        steps: draft steps whose rows are fitted together.

    Raises:
        DataError: a last state is missing.
    """
    mlp, norm = drafter.midlayer.mlp, drafter.midlayer.post_attention_layernorm
    width, device = drafter.shape.intermediate_size, mlp.down_proj.weight.device
    _draw(mlp.gate_proj, mlp.up_proj, seed)
    with torch.no_grad():
        mlp.down_proj.weight.zero_()
    gram = torch.zeros(width, width, dtype=torch.float64, device=device)
    cross = torch.zeros(width, drafter.shape.hidden_size, dtype=torch.float64, device=device)
    weight = away_from_zero(norm_weight.to(device=device, dtype=torch.float64))
    seen: list[tuple[Tensor, Tensor]] = []
    hook = norm.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    num_rows, total = 0, 0.0
    try:
        with torch.no_grad():
            for sample in samples:
                batch = pack([sample], device=device, dtype=mlp.down_proj.weight.dtype, steps=steps)
                if batch is None:
                    continue
                seen.clear()
                drafter.unroll(batch, steps)
                wanted = batch.teacher.to(torch.float64) / weight
                for step, (hidden, normed) in enumerate(seen):
                    inner = F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)
                    missing = wanted[batch.kept_on_device[step] + step] - hidden
                    share = gamma**step
                    gram.addmm_(inner.T.double(), inner.double(), alpha=share)
                    cross.addmm_(inner.T.double(), missing.double(), alpha=share)
                    total += share * len(inner)
                num_rows += len(batch.query_rows)
                if num_rows >= max_rows:
                    break
    finally:
        hook.remove()
    if num_rows:
        with torch.no_grad():
            mlp.down_proj.weight.copy_(ridge(gram / total, cross / total, RIDGE).T)
    return num_rows


def _draw(gate: nn.Linear, up: nn.Linear, seed: int) -> None:
    """Directions such that activations before the gate have about unit mean square."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for linear in (gate, up):
            drawn = torch.randn(linear.weight.shape, generator=generator, dtype=torch.float32)
            linear.weight.copy_(drawn / linear.in_features**0.5)
