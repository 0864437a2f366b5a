"""A plain forward pass of an exported drafter, written from the layout alone.

It shares no line with the trainer, so that agreement of the two says something: an export is sealed
only after the reloaded folder computed the trainer's logits here. One sample at a time, no caches.
Letters in names: T tokens, R rows, A aux layers, H hidden, N heads, D width of a head, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, silu

from eyas.base.errors import ExportMismatch
from eyas.export.layout import Eagle3Checkpoint
from eyas.export.rotary import rotary_frequencies


class ReferenceDrafter:
    """An exported drafter with the target's embedding, ready to compute.

    Args:
        checkpoint: as `read_eagle3` gives it.
        embedding: the target's embedding, [V, H].
        dtype: arithmetic; float32 or float64 make comparisons sharp.

    Raises:
        ExportMismatch: tensors are missing, or of another shape than the configuration says.
        DataError: a rope scaling that is not known here.
    """

    def __init__(
        self, checkpoint: Eagle3Checkpoint, embedding: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> None:
        checkpoint.require_whole()
        self.dimensions = checkpoint.dimensions
        self._dtype = dtype
        self._embedding = embedding
        self._weights = {name: tensor.to(dtype) for name, tensor in checkpoint.weights.items()}
        dims = self.dimensions
        frequencies, self._magnitude = rotary_frequencies(dims.head_dim, dims.rope_theta, dims.rope_scaling)
        self._frequencies = torch.from_numpy(frequencies)

    @torch.no_grad()
    def unroll(self, tokens: Sequence[int], aux: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
        """Logits of every row and draft step of one sample, teacher-forced.

        Step j of row t reads token t+1+j and predicts token t+2+j; its feature is the aux states for
        j = 0 and the previous step's output after that. It sees the keys of step 0 of rows up to t,
        and its own row's keys of steps 1 to j, at position t+j.

        Args:
            tokens: the sample, T ids.
            aux: captured states, [T, A, H].
            num_steps: draft steps J.

        Returns:
            One [R_j, Vd] tensor per step, R_j = T - 1 - j rows (none below zero).
        """
        ids = torch.as_tensor(list(tokens), dtype=torch.int64)
        feature_RH = self._features(aux.to(self._dtype).reshape(len(ids), -1))
        steps: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(num_steps):
            num_rows = max(0, len(ids) - 1 - step)
            embedded_RH = self._embedding[ids[1 + step :]].to(self._dtype)
            logits_RV, feature_RH = self._layer(
                embedded_RH, feature_RH[:num_rows], torch.arange(num_rows) + step, keys, values
            )
            steps.append(logits_RV)
        return steps

    def _features(self, aux_TX: torch.Tensor) -> torch.Tensor:
        if self.dimensions.norm_before_fc:
            aux_TX = self._norm(aux_TX, "input_norm")
        if self.dimensions.fc_norm:
            chunks = aux_TX.chunk(self.dimensions.num_aux, dim=-1)
            aux_TX = torch.cat([self._norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], dim=-1)
        return linear(aux_TX, self._weights["fc.weight"])

    def _layer(
        self,
        embedded_RH: torch.Tensor,
        feature_RH: torch.Tensor,
        positions_R: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_RH = self._norm(feature_RH, "midlayer.hidden_norm")
        residual_RH = normed_RH if self.dimensions.norm_before_residual else feature_RH
        both_R2H = torch.cat([self._norm(embedded_RH, "midlayer.input_layernorm"), normed_RH], dim=-1)
        residual_RH = residual_RH + self._attend(both_R2H, positions_R, keys, values)
        inner_RH = self._norm(residual_RH, "midlayer.post_attention_layernorm")
        gate_RI = silu(self._project(inner_RH, "mlp.gate_proj"))
        out_RH = residual_RH + self._project(
            gate_RI * self._project(inner_RH, "mlp.up_proj"), "mlp.down_proj"
        )
        normed_out_RH = self._norm(out_RH, "norm")
        logits_RV = linear(normed_out_RH, self._weights["lm_head.weight"])
        return logits_RV, normed_out_RH if self.dimensions.norm_output else out_RH

    def _attend(
        self,
        both_R2H: torch.Tensor,
        positions_R: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        dims, num_rows = self.dimensions, len(positions_R)
        query = self._heads(both_R2H, "q_proj", dims.num_heads)
        key = self._heads(both_R2H, "k_proj", dims.num_kv_heads)
        value = self._heads(both_R2H, "v_proj", dims.num_kv_heads)
        query, key = self._rotate(query, positions_R), self._rotate(key, positions_R)
        groups = dims.num_heads // dims.num_kv_heads
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        scale = dims.head_dim**-0.5
        first_NRR = torch.einsum("rnd,snd->nrs", query, keys[0][:num_rows]) * scale
        future = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
        scores = [first_NRR.masked_fill(future, float("-inf"))]
        scores += [torch.einsum("rnd,rnd->nr", query, k[:num_rows]).unsqueeze(-1) * scale for k in keys[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        out_RND = torch.einsum("nrs,snd->rnd", weights[..., :num_rows], values[0][:num_rows])
        for number, own in enumerate(values[1:]):
            out_RND = out_RND + weights[..., num_rows + number].T.unsqueeze(-1) * own[:num_rows]
        return self._project(out_RND.flatten(1), "self_attn.o_proj")

    def _heads(self, both_R2H: torch.Tensor, name: str, num_heads: int) -> torch.Tensor:
        projected = self._project(both_R2H, f"self_attn.{name}")
        return projected.reshape(len(both_R2H), num_heads, self.dimensions.head_dim)

    def _rotate(self, x_RND: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        angles = positions_R.to(torch.float64)[:, None] * self._frequencies
        cos = (angles.cos() * self._magnitude).to(self._dtype)[:, None]
        sin = (angles.sin() * self._magnitude).to(self._dtype)[:, None]
        left, right = x_RND.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._weights[f"midlayer.{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return x * (mean_square + self.dimensions.rms_norm_eps).rsqrt() * self._weights[f"{name}.weight"]


def largest_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest difference of logits, relative to the spread (standard deviation) of the reference's.

    Args:
        ours, theirs: one tensor of logits per draft step, equal shapes; ``ours`` is the reference.

    Raises:
        ExportMismatch: numbers of steps or shapes differ, or something is not finite.
    """
    if [tuple(t.shape) for t in ours] != [tuple(t.shape) for t in theirs]:
        raise ExportMismatch("the export gives logits of another shape than the trainer")
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.numel() == 0:
            continue
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            raise ExportMismatch("the export or the trainer gives logits that are not finite")
        spread = max(float(a.double().std()), 1e-12) if a.numel() > 1 else 1.0
        worst = max(worst, float((a.double() - b.double()).abs().max()) / spread)
    return worst


def require_agreement(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float
) -> float:
    """The largest relative difference, when it is within ``tolerance``.

    Args:
        tolerance: about 1e-3 when the trainer ran in float32 on the exported (rounded) weights.

    Raises:
        ExportMismatch: it is larger, or the two cannot be compared.
    """
    difference = largest_difference(ours, theirs)
    if difference > tolerance:
        raise ExportMismatch(
            "the export, read back, does not compute what was trained",
            why=f"logits differ by {difference:.2g} of their spread, {tolerance:.2g} is allowed",
            hint="eyas inspect on the export names what differs",
        )
    return difference
