"""The drafter while serving: one ragged cache of keys and values for a batch of answers."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafter.model import EagleDrafter, by_head
from eyas.drafter.rope import rotate
from eyas.drafter.wide import wide_dtype


class DraftCache:
    """Keys and values of true rows, with the draft steps of one round on top.

    A true row t is made of the target's aux states ``a[t]`` and the known token ``x[t+1]``. Only a
    batch row's newest true row needs more than its key and value: drafts start from it. A draft step
    puts its key behind the true ones; `extend` overwrites these, so drafts never outlive their round.
    """

    def __init__(self, drafter: EagleDrafter, batch_size: int) -> None:
        shape, weight = drafter.shape, drafter.fc.weight
        self._drafter, self._shape = drafter, shape
        self._angle_dtype = wide_dtype(weight.dtype)
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
        return self._newest(layer_input[batch, newest], feature[batch, newest], self.lengths - 1)

    @torch.no_grad()
    def draft(self, tokens: Tensor) -> Tensor:
        """One more draft step after the drafted ``tokens [B]``; draft logits ``[B, K]``."""
        self._depth += 1
        positions = self.lengths - 1 + self._depth
        layer_input = self._layer_input(tokens, self._feature)
        self._write(layer_input.unsqueeze(1), positions.unsqueeze(1))
        return self._newest(layer_input, self._feature, positions)

    @property
    def feature(self) -> Tensor:
        """``[B, H]`` from which the next draft step goes on."""
        return self._feature

    @torch.no_grad()
    def branch(self, tokens: Tensor, feature: Tensor, depth: int, lineage: Tensor) -> tuple[Tensor, Tensor]:
        """A draft step for several drafted tokens of one depth; they do not see each other.

        Args:
            tokens: ``[B, n]`` drafted.
            feature: ``[B, n, H]`` that each goes on from.
            depth: 1 for the first drafts of a round.
            lineage: ``[B, n, m + n]`` which of the round's nodes, the m of earlier calls first, each sees:
                those it descends from, and itself.

        Returns:
            Draft logits ``[B, n, K]``, and the features ``[B, n, H]`` behind the tokens.
        """
        num_tokens = tokens.shape[1]
        earlier = lineage.shape[2] - num_tokens
        first = self.lengths + earlier
        slots = first.unsqueeze(1) + torch.arange(num_tokens, device=tokens.device)
        positions = (self.lengths - 1 + depth).unsqueeze(1).expand(-1, num_tokens)
        layer_input = self._layer_input(tokens, feature)
        self._write(layer_input, positions, slots)
        num_keys = int(self.lengths.max()) + lineage.shape[2]
        keys = torch.arange(num_keys, device=tokens.device)
        place = keys - self.lengths.unsqueeze(1)
        within = place.clamp(0, lineage.shape[2] - 1).unsqueeze(1).expand(-1, num_tokens, -1)
        inside = (place >= 0) & (place < lineage.shape[2])
        seen = (place < 0).unsqueeze(1) | (inside.unsqueeze(1) & lineage.gather(2, within))
        return self._step(layer_input, feature, positions, seen)

    def keep(self, rows: Tensor) -> None:
        """Drop all answers but ``rows``."""
        self.lengths, self._feature = self.lengths[rows], self._feature[rows]
        self._key, self._value = self._key[rows], self._value[rows]

    def _layer_input(self, tokens: Tensor, feature: Tensor) -> Tensor:
        embedded = self._drafter.embed(tokens, feature.dtype)
        return torch.cat((embedded, self._drafter.midlayer.hidden_norm(feature)), dim=-1)

    def _write(self, layer_input: Tensor, positions: Tensor, slots: Tensor | None = None) -> None:
        """Keys and values of ``[B, q, 2H]``; padding lands behind the true rows and is overwritten later.

        ``slots [B, q]`` are their places in the cache where these are not their positions.
        """
        attention, width = self._drafter.midlayer.self_attn, self._shape.head_dim
        slots = positions if slots is None else slots
        self._grow(int(slots.max()) + 1)
        key = by_head(attention.k_proj(layer_input), width)
        value = by_head(attention.v_proj(layer_input), width)
        batch = torch.arange(len(positions), device=positions.device).unsqueeze(1)
        self._key[batch, slots] = self._turned(key, positions)
        self._value[batch, slots] = value

    def _newest(self, layer_input: Tensor, feature: Tensor, positions: Tensor) -> Tensor:
        """The layer for one query a batch row, over all keys up to its position; draft logits ``[B, K]``."""
        keys = torch.arange(int(positions.max()) + 1, device=positions.device)
        seen = (keys <= positions.unsqueeze(1)).unsqueeze(1)
        logits, after = self._step(
            layer_input.unsqueeze(1), feature.unsqueeze(1), positions.unsqueeze(1), seen
        )
        self._feature = after.squeeze(1)
        return logits.squeeze(1)

    def _step(
        self, layer_input: Tensor, feature: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer for queries ``[B, n, ...]`` over the keys that each has ``seen [B, n, keys]``."""
        attention, shape = self._drafter.midlayer.self_attn, self._shape
        query = self._turned(by_head(attention.q_proj(layer_input), shape.head_dim), positions)
        query = query.view(*query.shape[:2], shape.num_kv_heads, -1, shape.head_dim)
        key, value = self._key[:, : seen.shape[2]], self._value[:, : seen.shape[2]]
        scores = torch.einsum("bngrd,bkgd->bngrk", query, key) * shape.head_dim**-0.5
        unseen = seen.logical_not()[:, :, None, None]
        scores = scores.to(self._angle_dtype).masked_fill(unseen, float("-inf"))
        weights = scores.softmax(dim=-1).to(value.dtype)
        attended = torch.einsum("bngrk,bkgd->bngrd", weights, value).flatten(2, 3)
        output = self._drafter.midlayer.finish(feature, attended)
        normed, after = self._drafter.feedback(output)
        return self._drafter.logits(normed), after

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self._drafter.rope.angles(positions, self._angle_dtype)
        return rotate(x, cosine, sine)

    def _grow(self, num_keys: int) -> None:
        have = self._key.shape[1]
        if num_keys <= have:
            return
        more = max(num_keys - have, have, 64)
        # zeros, not whatever memory holds: a masked weight of 0 times NaN would still be NaN
        pad = self._key.new_zeros((len(self._key), more, *self._key.shape[2:]))
        self._key = torch.cat((self._key, pad), dim=1)
        self._value = torch.cat((self._value, pad), dim=1)
