"""The EAGLE-3 drafter: one decoder layer over (embedding, feature), unrolled over draft steps.

Li et al., EAGLE-3 (2025). State names are those of the checkpoints that engines load. The embedding is
the target's own: frozen, not a parameter and not saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.base.errors import ConfigError
from eyas.drafter.attention import plan_attention, step_attention
from eyas.drafter.batch import PackedBatch
from eyas.drafter.few_shapes import linear
from eyas.drafter.lean import rms_norm, silu_gated
from eyas.drafter.rope import RotaryPositions, rotate
from eyas.drafter.shape import DrafterShape
from eyas.drafter.shared_weight import SharedWeights
from eyas.drafter.wide import wide_dtype

INITIAL_STD = 0.02
"""Standard deviation of initial matrices, as in Llama."""


Product = Callable[[nn.Linear, Tensor], Tensor]
"""How an input is multiplied with a layer's weight."""


def alone(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's own product."""
    output: Tensor = layer(x)
    return output


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight; the mean is taken in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class AuxProjection(nn.Module):
    """``fc``, trained as if every aux state had the same size.

    Some aux states are ten thousand times larger than others, and an optimizer that moves every weight
    alike would throw the feature far off through these. So the parameter is the weight times the size
    of its column. Sizes are powers of two: going to the checkpoint's plain weight and back is exact.
    """

    scale: Tensor

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.register_buffer("scale", torch.ones(num_inputs), persistent=False)
        nn.init.normal_(self.weight, std=INITIAL_STD)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight / self.scale)

    def set_sizes(self, sizes: Tensor) -> None:
        """Take column sizes ``[A T]``, rounded to powers of two; the plain weight stays as it is."""
        with torch.no_grad():
            rounded = torch.where(sizes > 0, sizes, torch.ones_like(sizes)).double().log2().round().exp2()
            rounded = rounded.to(self.scale)
            self.weight.mul_(rounded / self.scale)
            self.scale.copy_(rounded)

    def set_plain_weight(self, weight: Tensor) -> None:
        """Take the weight ``[H, A T]`` as checkpoints hold it."""
        with torch.no_grad():
            self.weight.copy_(weight.to(self.weight) * self.scale)

    def plain(self, weight: Tensor) -> Tensor:
        """A weight ``[H, A T]`` as it is trained, in the form that checkpoints hold."""
        return weight / self.scale.to(weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        plain = self.plain(self.weight)
        destination[prefix + "weight"] = plain if keep_vars else plain.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        name = prefix + "weight"
        if name in state_dict:
            state_dict[name] = state_dict[name].to(self.scale) * self.scale
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Attention(nn.Module):
    """The projections; the softmax itself lies in `eyas.drafter.attention` and in the cache."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        wide = 2 * shape.hidden_size
        self.q_proj = nn.Linear(wide, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)


class Mlp(nn.Module):
    """SiLU-gated MLP."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, product: Product = alone) -> Tensor:
        return product(self.down_proj, silu_gated(product(self.gate_proj, x), product(self.up_proj, x)))


class Midlayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)

    def finish(self, feature: Tensor, attended: Tensor, product: Product = alone) -> Tensor:
        """Output of the layer from its residual and what attention gave ``[..., heads, D]``."""
        hidden = feature + product(self.self_attn.o_proj, attended.flatten(-2))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), product)
        return output


class EagleDrafter(nn.Module):
    """A drafter of a given shape.

    Args:
        embedding: the target's ``[V, H]``; shared, never trained.

    Raises:
        ConfigError: the embedding does not fit the shape.
    """

    embedding: Tensor

    def __init__(self, shape: DrafterShape, embedding: Tensor) -> None:
        super().__init__()
        if tuple(embedding.shape) != (shape.target_vocab_size, shape.hidden_size):
            raise ConfigError(
                "the target's embedding does not fit the drafter",
                where=f"embedding {list(embedding.shape)}",
                why=f"expected [{shape.target_vocab_size}, {shape.hidden_size}]",
            )
        self.shape = shape
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.fc = AuxProjection(shape.num_aux * shape.target_hidden_size, shape.hidden_size)
        if shape.normed_feedback:
            norms = [RmsNorm(shape.target_hidden_size, shape.rms_norm_eps) for _ in range(shape.num_aux)]
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Midlayer(shape)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rope = RotaryPositions(
            shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.max_position_embeddings
        )

    def initialise(self, seed: int) -> None:
        """Give every matrix normal numbers of its own stream and every norm ones."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                    parameter.copy_(values * INITIAL_STD)

    def combine(self, aux: Tensor) -> Tensor:
        """Features ``f0 [..., H]`` from aux states ``[..., A, T]``."""
        if self.shape.normed_feedback:
            aux = torch.stack([norm(aux[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        feature: Tensor = self.fc(aux.flatten(-2))
        return feature

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Normed embeddings ``[..., H]``."""
        embedded: Tensor = self.midlayer.input_layernorm(F.embedding(tokens, self.embedding).to(dtype))
        return embedded

    def feedback(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """From a layer's output: what the head takes, and the next step's feature."""
        normed = self.norm(output)
        return normed, normed if self.shape.normed_feedback else output

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits ``[..., K]``."""
        logits: Tensor = self.lm_head(normed)
        return logits

    def unroll(self, batch: PackedBatch, steps: int) -> list[Tensor]:
        """What the head takes at each step: ``[n_j, H]`` for j = 0..steps-1.

        Keys and values of step 0 are made for all rows, everything else for supervised rows only. The
        embedding's part of the projections is made once: step j of row t reads the same token as step
        0 of row t + j.
        """
        feature = self.combine(batch.aux)
        shared = SharedWeights(feature.dtype)
        projections = _Projections(self.midlayer.self_attn, self.shape, shared)
        embedded = self.embed(batch.next_tokens, feature.dtype)
        normed_feature = self.midlayer.hidden_norm(feature)
        rows = batch.query_rows_on_device
        cosine, sine = self.rope.angles(batch.positions, wide_dtype(feature.dtype))
        from_token = projections.key_value(embedded, token=True)
        key, value = (from_token + projections.key_value(normed_feature, token=False)).chunk(2, dim=-2)
        key = rotate(key, cosine, sine)
        query_from_token = projections.query(embedded.index_select(0, rows), token=True)
        from_token = from_token.index_select(0, rows)
        feature, normed_feature = feature.index_select(0, rows), normed_feature.index_select(0, rows)
        query = query_from_token + projections.query(normed_feature, token=False)
        cosine, sine = cosine.index_select(0, rows), sine.index_select(0, rows)
        positions = batch.positions.index_select(0, rows)
        own_key = key.new_empty((0, len(rows), *key.shape[1:]))
        own_value = own_key
        heads = []
        for step in range(steps):
            kept = batch.kept_on_device[step]
            if step > 0:
                place = torch.searchsorted(batch.kept_on_device[step - 1], kept)
                feature = feature.index_select(0, place)
                normed_feature = self.midlayer.hidden_norm(feature)
                ahead = kept + step
                query = query_from_token.index_select(0, ahead) + projections.query(
                    normed_feature, token=False
                )
                new_key, new_value = (
                    from_token.index_select(0, ahead) + projections.key_value(normed_feature, token=False)
                ).chunk(2, dim=-2)
                cosine, sine = self.rope.angles(
                    positions.index_select(0, kept) + step, wide_dtype(feature.dtype)
                )
                new_key = rotate(new_key, cosine, sine)
                own_key = torch.cat((own_key.index_select(1, place), new_key.unsqueeze(0)))
                own_value = torch.cat((own_value.index_select(1, place), new_value.unsqueeze(0)))
            plan = plan_attention(
                batch.query_rows[batch.kept[step]],
                batch.row_bounds,
                self.shape.num_heads,
                key.device,
                key.dtype,
            )
            attended = step_attention(rotate(query, cosine, sine), key, value, own_key, own_value, plan)
            normed, feature = self.feedback(self.midlayer.finish(feature, attended, shared))
            heads.append(normed)
        return heads


class _Projections:
    """Query, key and value weights, split into the token's and the feature's half."""

    def __init__(self, attention: Attention, shape: DrafterShape, shared: SharedWeights) -> None:
        self._shape, self._shared = shape, shared
        key_value = torch.cat((attention.k_proj.weight, attention.v_proj.weight))
        self._query = attention.q_proj.weight.chunk(2, dim=1)
        self._key_value = key_value.chunk(2, dim=1)

    def query(self, x: Tensor, *, token: bool) -> Tensor:
        """``[n, heads, D]``, not turned yet."""
        return by_head(self._shared.product(self._query[0 if token else 1], x), self._shape.head_dim)

    def key_value(self, x: Tensor, *, token: bool) -> Tensor:
        """Keys, then values: ``[n, 2 G, D]``, not turned yet."""
        return by_head(self._shared.product(self._key_value[0 if token else 1], x), self._shape.head_dim)


def by_head(x: Tensor, width: int) -> Tensor:
    """``[..., heads * D]`` as ``[..., heads, D]``."""
    return x.view(*x.shape[:-1], x.shape[-1] // width, width)
