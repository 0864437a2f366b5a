"""The drafter once more, in float64 numpy with a loop for everything; nothing is shared with eyas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * weight


def rotate(x: Array, position: int, theta: float) -> Array:
    """One head's vector; channel i is paired with channel i + D/2."""
    half = len(x) // 2
    out = np.zeros_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def naive_logits(
    w: dict[str, Array],
    shape: dict[str, Any],
    embedding: Array,
    tokens: list[int],
    aux: Array,
    num_steps: int,
) -> list[list[Array]]:
    """logits[j][t], one row at a time; aux is [T, A, H]."""
    eps, theta = shape["rms_norm_eps"], shape["rope_theta"]
    heads, kv_heads, d = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    new_norms = shape["norms"] == "eagle3.1"
    features = []
    for t in range(len(tokens)):
        chunks = [aux[t, a] for a in range(shape["num_aux"])]
        if new_norms:
            chunks = [rms(c, w[f"fc_norm.{a}.weight"], eps) for a, c in enumerate(chunks)]
        features.append(w["fc.weight"] @ np.concatenate(chunks))
    keys: dict[tuple[int, int], list[Array]] = {}
    values: dict[tuple[int, int], list[Array]] = {}
    result: list[list[Array]] = []
    for j in range(num_steps):
        rows = range(max(0, len(tokens) - 1 - j))
        inputs = {}
        for t in rows:
            x = np.concatenate(
                [
                    rms(embedding[tokens[t + 1 + j]], w["midlayer.input_layernorm.weight"], eps),
                    rms(features[t], w["midlayer.hidden_norm.weight"], eps),
                ]
            )
            inputs[t] = x
            k, v = w["midlayer.self_attn.k_proj.weight"] @ x, w["midlayer.self_attn.v_proj.weight"] @ x
            keys[j, t] = [rotate(k[n * d : (n + 1) * d], t + j, theta) for n in range(kv_heads)]
            values[j, t] = [v[n * d : (n + 1) * d] for n in range(kv_heads)]
        outputs, logits = [], []
        for t in rows:
            seen = [(0, s) for s in range(t + 1)] + [(i, t) for i in range(1, j + 1)]
            q = w["midlayer.self_attn.q_proj.weight"] @ inputs[t]
            attended = []
            for n in range(heads):
                kv = n * kv_heads // heads
                query = rotate(q[n * d : (n + 1) * d], t + j, theta)
                scores = np.array([query @ keys[at][kv] / math.sqrt(d) for at in seen])
                share = np.exp(scores - scores.max())
                share /= share.sum()
                attended.append(sum(p * values[at][kv] for p, at in zip(share, seen, strict=True)))
            x = features[t] + w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(attended)
            inner = rms(x, w["midlayer.post_attention_layernorm.weight"], eps)
            gate = w["midlayer.mlp.gate_proj.weight"] @ inner
            up = w["midlayer.mlp.up_proj.weight"] @ inner
            x = x + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
            normed = rms(x, w["norm.weight"], eps)
            logits.append(w["lm_head.weight"] @ normed)
            outputs.append(normed if new_norms else x)
        result.append(logits)
        features = outputs
    return result
