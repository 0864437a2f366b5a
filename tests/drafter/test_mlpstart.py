"""The MLP's start against least squares over rows made by the naive drafter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.drafter.mlpstart import RIDGE, start_mlp
from tests.drafter.cases import make_drafter, make_sample
from tests.drafter.naive import NaiveDrafter, rms

NORM = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
GAMMA = 0.7


def inner_and_missing(naive, tokens, spans, aux, last, steps):
    """(step, activations, what is missing) of each supervised row; the naive drafter's down is zero."""
    rows = []
    base = [naive.projected(tokens[t + 1], naive.feature0(aux[t]), t) for t in range(len(tokens) - 1)]
    for row in range(len(tokens)):
        own_steps, feature = [], naive.feature0(aux[row])
        for step in range(steps):
            if not any(a <= row + 1 and row + 2 + step < b for a, b in spans):
                break
            earlier = base[:row] if step == 0 else base[: row + 1] + own_steps
            hidden, own = naive.layer(tokens[row + 1 + step], feature, row + step, earlier)
            own_steps += [own] if step else []
            normed = rms(hidden, naive.w["midlayer.post_attention_layernorm.weight"], naive.s.rms_norm_eps)
            gate = naive.w["midlayer.mlp.gate_proj.weight"] @ normed
            inner = gate * torch.sigmoid(gate) * (naive.w["midlayer.mlp.up_proj.weight"] @ normed)
            rows.append((step, inner.numpy(), (last[row + 1 + step] / NORM - hidden).numpy()))
            output = rms(hidden, naive.w["norm.weight"], naive.s.rms_norm_eps)
            feature = output if naive.s.norms == "eagle3.1" else hidden
    return rows


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("steps", [1, 2])
def test_down_is_the_penalised_least_squares_fit(norms, steps):
    drafter = make_drafter(norms)
    made = [make_sample(f"s{i}", 12, [(1, 6), (7, 12)], i) for i in range(9)]
    used = start_mlp(
        drafter, [sample for sample, _ in made], NORM, gamma=GAMMA, seed=3, steps=steps, max_rows=10**6
    )
    weights = {name: value.detach().clone() for name, value in drafter.state_dict().items()}
    found = weights["midlayer.mlp.down_proj.weight"].numpy()
    weights["midlayer.mlp.down_proj.weight"] = torch.zeros(found.shape, dtype=torch.float64)
    naive = NaiveDrafter(weights, drafter.shape, drafter.embedding)
    rows = [row for _, sample in made for row in inner_and_missing(naive, *sample, steps)]
    assert used == sum(step == 0 for step, _, _ in rows) == 9 * 8
    share = np.array([GAMMA**step for step, _, _ in rows])
    inner, missing = np.array([a for _, a, _ in rows]), np.array([b for _, _, b in rows])
    size = np.sqrt((share[:, None] * inner**2).sum(0))
    left = np.vstack([np.sqrt(share)[:, None] * inner, np.diag(np.sqrt(RIDGE) * size)])
    right = np.vstack([np.sqrt(share)[:, None] * missing, np.zeros((inner.shape[1], 12))])
    wanted = np.linalg.lstsq(left, right, rcond=None)[0].T
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)
    assert np.abs(wanted).max() > 0.01


def test_gate_and_up_depend_on_the_seed_alone():
    first, again, other = (make_drafter(seed=s) for s in (0, 1, 0))
    for drafter, seed in ((first, 3), (again, 3), (other, 4)):
        start_mlp(drafter, [], NORM, gamma=GAMMA, seed=seed, steps=2, max_rows=10)
    drawn = [
        torch.cat([d.midlayer.mlp.gate_proj.weight, d.midlayer.mlp.up_proj.weight])
        for d in (first, again, other)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not first.midlayer.mlp.down_proj.weight.any()


def test_it_stops_after_enough_rows():
    made = [make_sample(f"s{i}", 12, [(1, 6), (7, 12)], i)[0] for i in range(9)]
    assert start_mlp(make_drafter(), made, NORM, gamma=GAMMA, seed=3, steps=2, max_rows=10) == 16
