"""The drafter while serving: one ragged cache of keys and values for a batch of answers."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafter.model import EagleDrafter, by_head
from eyas.drafter.rope import rotate


class DraftCache:
    """Keys and values of true rows, with the draft steps of one round on top.

    A true row t is made of the target's aux states ``a[t]`` and the known token ``x[t+1]``. Only a
    batch row's newest true row needs more than its key and value: drafts start from it. A draft step
    puts its key behind the true ones; `extend` overwrites these, so drafts never outlive their round.
    """

    def __init__(self, drafter: EagleDrafter, batch_size: int) -> None:
        shape, weight = drafter.shape, drafter.fc.weight
        self._drafter, self._shape = drafter, shape
        self._angle_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        size = (batch_size, 0, shape.num_kv_heads, shape.head_dim)
        self._key, self._value = weight.new_empty(size), weight.new_empty(size)
        self._feature = weight.new_empty((batch_size, shape.hidden_size))
        self._depth = 0

    @torch.no_grad()
    def extend(self, aux: Tensor, tokens: Tensor, num_new: Tensor) -> Tensor:
        """Add true rows, right-padded, and forget the drafts; draft logits ``[B, K]`` of step 0.

        Args:
            aux: ``[B, q, A, T]``.
            tokens: ``[B, q]``, the token after each row.
            num_new: ``[B]``, at least 1 each.
        """
        drafter = self._drafter
        feature = drafter.combine(aux.to(self._key.dtype))
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        positions = self.lengths.unsqueeze(1) + ahead
        layer_input = self._layer_input(tokens, feature)
        self._write(layer_input, positions)
        batch = torch.arange(len(tokens), device=tokens.device)
        newest = num_new - 1
        self.lengths = self.lengths + num_new
        self._depth = 0
        return self._step(layer_input[batch, newest], feature[batch, newest], self.lengths - 1)

    @torch.no_grad()
    def draft(self, tokens: Tensor) -> Tensor:
        """One more draft step after the drafted ``tokens [B]``; draft logits ``[B, K]``."""
        self._depth += 1
        positions = self.lengths - 1 + self._depth
        layer_input = self._layer_input(tokens, self._feature)
        self._write(layer_input.unsqueeze(1), positions.unsqueeze(1))
        return self._step(layer_input, self._feature, positions)

    def keep(self, rows: Tensor) -> None:
        """Drop all answers but ``rows``."""
        self.lengths, self._feature = self.lengths[rows], self._feature[rows]
        self._key, self._value = self._key[rows], self._value[rows]

    def _layer_input(self, tokens: Tensor, feature: Tensor) -> Tensor:
        embedded = self._drafter.embed(tokens, feature.dtype)
        return torch.cat((embedded, self._drafter.midlayer.hidden_norm(feature)), dim=-1)

    def _write(self, layer_input: Tensor, positions: Tensor) -> None:
        """Keys and values of ``[B, q, 2H]``; padding lands behind the true rows and is overwritten later."""
        attention, width = self._drafter.midlayer.self_attn, self._shape.head_dim
        self._grow(int(positions.max()) + 1)
        key = by_head(attention.k_proj(layer_input), width)
        value = by_head(attention.v_proj(layer_input), width)
        batch = torch.arange(len(positions), device=positions.device).unsqueeze(1)
        self._key[batch, positions] = self._turned(key, positions)
        self._value[batch, positions] = value

    def _step(self, layer_input: Tensor, feature: Tensor, positions: Tensor) -> Tensor:
        """The layer for one query a batch row, over all keys up to its position."""
        attention, shape = self._drafter.midlayer.self_attn, self._shape
        query = self._turned(by_head(attention.q_proj(layer_input), shape.head_dim), positions)
        query = query.view(len(query), shape.num_kv_heads, -1, shape.head_dim)
        num_keys = int(positions.max()) + 1
        key, value = self._key[:, :num_keys], self._value[:, :num_keys]
        scores = torch.einsum("bgrd,bkgd->bgrk", query, key) * shape.head_dim**-0.5
        unseen = torch.arange(num_keys, device=positions.device) > positions.unsqueeze(1)
        scores = scores.to(self._angle_dtype).masked_fill(unseen[:, None, None], float("-inf"))
        weights = scores.softmax(dim=-1).to(value.dtype)
        attended = torch.einsum("bgrk,bkgd->bgrd", weights, value).flatten(1, 2)
        output = self._drafter.midlayer.finish(feature, attended)
        normed, self._feature = self._drafter.feedback(output)
        return self._drafter.logits(normed)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self._drafter.rope.angles(positions, self._angle_dtype)
        return rotate(x, cosine, sine).to(x.dtype)

    def _grow(self, num_keys: int) -> None:
        have = self._key.shape[1]
        if num_keys <= have:
            return
        more = max(num_keys - have, have, 64)
        # zeros, not whatever memory holds: a masked weight of 0 times NaN would still be NaN
        pad = self._key.new_zeros((len(self._key), more, *self._key.shape[2:]))
        self._key = torch.cat((self._key, pad), dim=1)
        self._value = torch.cat((self._value, pad), dim=1)
