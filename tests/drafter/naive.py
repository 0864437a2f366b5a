"""The definition of the drafter, row by row with loops, in plain tensor arithmetic.

Shares no code with the package: it takes weights by name, tokens, spans and states.
"""

from __future__ import annotations

import math

import torch


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(vector, position, theta):
    """One head, as complex numbers made of element i and element i + D/2."""
    half = len(vector) // 2
    rows = []
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        rows.append((a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)))
    return torch.stack([a for a, _ in rows] + [b for _, b in rows])


def is_supervised(spans, length, row, step):
    """x[t+1] .. x[t+2+j] lie in one span and within the sample."""
    return any(start <= row + 1 and row + 2 + step < min(end, length) for start, end in spans)


class NaiveDrafter:
    def __init__(self, weights, shape, embedding):
        self.w, self.s, self.embedding = weights, shape, embedding

    def feature0(self, aux):
        chunks = [aux[i] for i in range(self.s.num_aux)]
        if self.s.norms == "eagle3.1":
            chunks = [
                rms(chunk, self.w[f"fc_norm.{i}.weight"], self.s.rms_norm_eps)
                for i, chunk in enumerate(chunks)
            ]
        return self.w["fc.weight"] @ torch.cat(chunks)

    def projected(self, token, feature, position):
        """(queries per head, keys per key-value head, values per key-value head) of one layer input."""
        s, w, eps = self.s, self.w, self.s.rms_norm_eps
        left = rms(self.embedding[token], w["midlayer.input_layernorm.weight"], eps)
        right = rms(feature, w["midlayer.hidden_norm.weight"], eps)
        both = torch.cat([left, right])
        out = {}
        for name in "qkv":
            flat = w[f"midlayer.self_attn.{name}_proj.weight"] @ both
            heads = [flat[i * s.head_dim : (i + 1) * s.head_dim] for i in range(len(flat) // s.head_dim)]
            out[name] = heads if name == "v" else [turn(h, position, s.rope_theta) for h in heads]
        return out

    def layer(self, token, feature, position, earlier):
        """Layer output at one row and step; ``earlier`` are the projections that it may also attend to."""
        s, w = self.s, self.w
        own = self.projected(token, feature, position)
        seen = [*earlier, own]
        outputs = []
        for head in range(s.num_heads):
            group = head // (s.num_heads // s.num_kv_heads)
            scores = torch.stack([own["q"][head] @ one["k"][group] / math.sqrt(s.head_dim) for one in seen])
            weights = torch.softmax(scores, dim=0)
            outputs.append(sum(weights[i] * one["v"][group] for i, one in enumerate(seen)))
        hidden = feature + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(outputs)
        normed = rms(hidden, w["midlayer.post_attention_layernorm.weight"], s.rms_norm_eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ normed
        up = w["midlayer.mlp.up_proj.weight"] @ normed
        return hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up), own

    def logits(self, tokens, spans, aux, steps):
        """{(row, step): draft logits} of every supervised row."""
        found = {}
        base = [self.projected(tokens[t + 1], self.feature0(aux[t]), t) for t in range(len(tokens) - 1)]
        for row in range(len(tokens)):
            feature, own_steps = None, []
            for step in range(steps):
                if not is_supervised(spans, len(tokens), row, step):
                    break
                if step == 0:
                    feature = self.feature0(aux[row])
                earlier = base[:row] if step == 0 else base[: row + 1] + own_steps
                output, own = self.layer(tokens[row + 1 + step], feature, row + step, earlier)
                if step > 0:
                    own_steps.append(own)
                normed = rms(output, self.w["norm.weight"], self.s.rms_norm_eps)
                feature = normed if self.s.norms == "eagle3.1" else output
                found[row, step] = self.w["lm_head.weight"] @ normed
        return found


def row_loss(kind, logits, target_logits, target_ids):
    """Loss of one row from draft logits [K] and the target's logits [V]."""
    q = torch.softmax(logits, dim=0)
    real = torch.softmax(target_logits, dim=0)[target_ids]
    p = torch.softmax(target_logits[target_ids], dim=0)
    cross = -sum(p[i] * torch.log(q[i]) for i in range(len(q)))
    alpha = sum(torch.minimum(q[i], real[i]) for i in range(len(q)))
    if kind == "soft_ce":
        return cross
    if kind == "kl":
        return cross + sum(p[i] * torch.log(p[i]) for i in range(len(q)))
    if kind == "lk":
        return -torch.log(alpha)
    return cross - torch.log(alpha)


def batch_loss(drafter, samples, head, target_ids, kind, steps, gamma):
    """sum over steps of gamma^j times the mean over supervised rows; samples are (tokens, spans, aux, h)."""
    losses = [[] for _ in range(steps)]
    for tokens, spans, aux, last in samples:
        for (row, step), logits in drafter.logits(tokens, spans, aux, steps).items():
            losses[step].append(row_loss(kind, logits, head @ last[row + 1 + step], target_ids))
    return sum(gamma**j * sum(rows) / len(rows) for j, rows in enumerate(losses) if rows)
