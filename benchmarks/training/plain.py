"""The step as EAGLE-3 is defined, with none of the savings, in ordinary PyTorch.

Every row at every step, prompts too; scores of all rows and of the row's own later keys side by side in one
softmax; logits of all rows at once. In float64 it is the referee of the losses that contestants report.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from benchmarks.training.case import EPS, THETA, Case, Parts, make_parts
from benchmarks.training.contestant import Optimizer, row_shares
from torch import Tensor


class Contestant:
    version = torch.__version__
    shifted = True
    objective = "soft_ce"

    def __init__(self, case: Case) -> None:
        self._case, parts = case, make_parts(case)
        self._inputs = Inputs(case, parts, torch.float32)
        self._weights = {name: tensor.requires_grad_() for name, tensor in parts.weights.items()}
        self._optimizer = Optimizer(case, self._weights.values())

    def step(self) -> list[float]:
        case = self._case
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "bfloat16"):
            losses, _ = row_losses(case, self._weights, self._inputs)
        sums, total = [], torch.zeros(())
        for step, (row, share) in enumerate(zip(losses, row_shares(case, shifted=True), strict=True)):
            rows = case.rows(step, shifted=True)
            sums.append(row[rows.start : rows.stop].sum())
            total = total + sums[-1] * share
        total.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return [float(x.detach()) for x in sums]


class Inputs:
    """What the step reads, in one arithmetic."""

    def __init__(self, case: Case, parts: Parts, dtype: torch.dtype) -> None:
        self.embedding = parts.embedding.to(dtype)
        self.draft_head = parts.head[parts.draft_ids].to(dtype)
        self.aux = parts.aux.to(dtype)
        self.last = parts.last.to(dtype)
        # token and teacher of a row lie one row behind it; behind the end there is nothing, and no loss
        self.tokens = F.pad(parts.tokens[1:], (0, case.steps + 1))
        self.teacher = F.pad(self.last[1:], (0, 0, 0, case.steps + 1))


def row_losses(case: Case, weights: dict[str, Tensor], inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """For each step, soft cross-entropy of each row ``[L]``, and the teacher's entropy of each row."""
    length, dtype = case.length, inputs.last.dtype
    feature = F.linear(inputs.aux.flatten(1), weights["fc.weight"])
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    losses, entropies = [], []
    for step in range(case.steps):
        embedded = inputs.embedding[inputs.tokens[step : step + length]]
        both = torch.cat(
            (_rms(embedded, weights["midlayer.input_layernorm.weight"]),
             _rms(feature, weights["midlayer.hidden_norm.weight"])), dim=-1)  # fmt: skip
        query, key, value = (
            F.linear(both, weights[f"midlayer.self_attn.{name}_proj.weight"])
            .view(length, -1, case.head_dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        positions = torch.arange(length) + step
        group = case.heads // case.kv_heads
        query = _turn(query, positions)
        keys.append(_turn(key, positions).repeat_interleave(group, dim=0))
        values.append(value.repeat_interleave(group, dim=0))
        scores = (query @ keys[0].transpose(1, 2)).masked_fill(future, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
        mixed = (torch.cat([scores, *own], dim=-1) * case.head_dim**-0.5).softmax(dim=-1).to(value.dtype)
        attended = mixed[..., :length] @ values[0]
        for later, own_value in enumerate(values[1:]):
            attended = attended + mixed[..., length + later, None] * own_value
        attended = F.linear(attended.transpose(0, 1).flatten(1), weights["midlayer.self_attn.o_proj.weight"])
        hidden = feature + attended
        normed = _rms(hidden, weights["midlayer.post_attention_layernorm.weight"])
        gate = F.silu(F.linear(normed, weights["midlayer.mlp.gate_proj.weight"]))
        up = F.linear(normed, weights["midlayer.mlp.up_proj.weight"])
        feature = hidden + F.linear(gate * up, weights["midlayer.mlp.down_proj.weight"])
        logits = F.linear(_rms(feature, weights["norm.weight"]), weights["lm_head.weight"])
        with torch.no_grad():
            raw = F.linear(inputs.teacher[step : step + length], inputs.draft_head)
            wanted = raw.to(dtype).softmax(dim=-1)
            entropies.append(-torch.xlogy(wanted, wanted).sum(dim=-1))
        losses.append(-(wanted * logits.to(dtype).log_softmax(dim=-1)).sum(dim=-1))
    return losses, entropies


def reference_sums(case: Case) -> dict[str, dict[str, list[float]]]:
    """In float64, sums of row losses at the first weights: by objective, by which rows, by step."""
    parts = make_parts(case)
    weights = {name: tensor.double() for name, tensor in parts.weights.items()}
    with torch.no_grad():
        losses, entropies = row_losses(case, weights, Inputs(case, parts, torch.float64))
    found: dict[str, dict[str, list[float]]] = {}
    for objective in ("soft_ce", "kl"):
        found[objective] = {}
        for shifted in (False, True):
            sums = []
            for step, (loss, entropy) in enumerate(zip(losses, entropies, strict=True)):
                rows = case.rows(step, shifted=shifted)
                row = loss - entropy if objective == "kl" else loss
                sums.append(float(row[rows.start : rows.stop].sum()))
            found[objective]["shifted" if shifted else "span"] = sums
    return found


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def _turn(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = THETA ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double().unsqueeze(-1) * frequencies
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
