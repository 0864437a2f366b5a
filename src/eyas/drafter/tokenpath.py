"""A layer that begins by looking at its own row, and by adding what the next token alone tells.

A drafter's layer sees the token that was just said only through attention. With random weights every
row looks at all earlier rows alike, and what the row's own token says is lost in the average; a short
training spends most of its steps on finding it again. Two closed-form starts spare it that:

- Query and key weights begin equal. A row's score with itself is then a squared norm, which scores with
  other rows stay below as long as their inputs differ, so attention begins on the row itself.
- Values and output projection begin as the best approximation of a given map from the embedding: with
  attention on the row itself, the layer then adds that map of ``x[t+1]`` to the feature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafter.model import EagleDrafter

OWN_SCORE = 9.0
"""Score of a row with itself at the start: about e^9 times the weight of a row that is unlike it."""


def start_on_own_row(drafter: EagleDrafter, seed: int) -> None:
    """Give queries and keys equal random weights, such that a row's own score is about `OWN_SCORE`.

    The input is normed: its 2H entries have unit mean square, so a head's squared norm is
    ``2 H D std^2``, and the score is that over ``sqrt(D)``.
    """
    shape, attention = drafter.shape, drafter.midlayer.self_attn
    std = (OWN_SCORE / (2 * shape.hidden_size * shape.head_dim**0.5)) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        drawn = torch.randn(attention.k_proj.weight.shape, generator=generator, dtype=torch.float32) * std
        attention.k_proj.weight.copy_(drawn)
        per_group = shape.num_heads // shape.num_kv_heads
        heads = drawn.view(shape.num_kv_heads, shape.head_dim, -1)
        attention.q_proj.weight.copy_(heads.repeat_interleave(per_group, dim=0).flatten(0, 1))


def start_token_path(drafter: EagleDrafter, token_map: Tensor) -> float:
    """Let values and output projection begin as ``token_map``, as far as their rank allows.

    The MLP's output begins at zero, so that the layer's first answer is the feature plus this map.

    Args:
        token_map: ``[H, H]``, applied to the normed embedding of ``x[t+1]``.

    Returns:
        The share of the map's squared norm that is kept.
    """
    shape, attention = drafter.shape, drafter.midlayer.self_attn
    left, sizes, right = torch.linalg.svd(token_map.double())
    width = shape.num_kv_heads * shape.head_dim
    rank = min(width, len(sizes))
    root = sizes[:rank].sqrt()
    per_group = shape.num_heads // shape.num_kv_heads
    with torch.no_grad():
        value = torch.zeros_like(attention.v_proj.weight)
        value[:rank, : shape.hidden_size] = (root.unsqueeze(1) * right[:rank]).to(value)
        attention.v_proj.weight.copy_(value)
        output = torch.zeros(shape.hidden_size, width, dtype=torch.float64, device=token_map.device)
        output[:, :rank] = left[:, :rank] * root
        # every head of a group brings the same values, so each takes its share
        parts = output.view(-1, shape.num_kv_heads, shape.head_dim) / per_group
        attention.o_proj.weight.copy_(
            parts.repeat_interleave(per_group, dim=1).flatten(1).to(attention.o_proj.weight)
        )
        drafter.midlayer.mlp.down_proj.weight.zero_()
    return float((sizes[:rank] ** 2).sum() / (sizes**2).sum().clamp(min=1e-30))
