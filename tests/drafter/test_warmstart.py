from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from eyas.base.errors import ConfigError, DataError
from eyas.drafter.batch import TrainingSample
from eyas.drafter.settings import TrainSettings
from eyas.drafter.warmstart import RIDGE, fit_fc, give_first_weights, start_from_head
from tests.drafter.cases import MemorySource, make_drafter, make_head, make_sample, make_vocabulary
from tests.drafter.naive import is_supervised

NORM = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)


def samples(count=30):
    return [make_sample(f"s{i}", 14, [(2, 7), (8, 14)], i) for i in range(count)]


def test_head_rows_and_half_the_norm():
    drafter, vocabulary = make_drafter(), make_vocabulary()
    start_from_head(drafter, make_head(), NORM, vocabulary)
    for draft_id, target_id in enumerate(vocabulary.target_ids):
        assert torch.equal(drafter.lm_head.weight[draft_id], make_head()[target_id])
    assert torch.equal(drafter.norm.weight, NORM / 2)


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_fc_is_the_penalised_least_squares_fit(norms):
    """Against numpy's least squares on rows collected by the definition, the penalty as extra rows."""
    drafter = make_drafter(norms)
    inputs, outputs = [], []
    for _, (tokens, spans, aux, last) in samples():
        for row in range(len(tokens)):
            if is_supervised(spans, len(tokens), row, 0):
                chunks = aux[row].numpy()
                if norms == "eagle3.1":
                    chunks = chunks / np.sqrt((chunks**2).mean(1, keepdims=True) + 1e-5)
                inputs.append(chunks.reshape(-1))
                outputs.append(last[row + 1].numpy() / NORM.numpy())
    x, y = np.array(inputs), np.array(outputs)
    penalty = np.diag(np.sqrt(RIDGE * len(x) * (x**2).mean(0)))
    wanted = np.linalg.lstsq(np.vstack([x, penalty]), np.vstack([y, np.zeros((36, 12))]), rcond=None)[0]
    used = fit_fc(drafter, (sample for sample, _ in samples()), NORM)
    assert used == len(x)
    np.testing.assert_allclose(drafter.fc.weight.detach().numpy(), wanted.T, atol=1e-9)


def test_a_linear_target_is_found_whatever_the_scales():
    """Aux states of very unequal scale, as real ones are, in float32."""
    generator = torch.Generator().manual_seed(0)
    mapping = torch.randn(12, 36, generator=generator, dtype=torch.float64)
    scales = torch.logspace(-2, 4, 36, dtype=torch.float64)
    made = []
    for sample, (_, _, aux, last) in samples(60):
        wide = (aux.flatten(1) * scales).reshape(aux.shape)
        last[1:] = (aux.flatten(1)[:-1] @ mapping.T) * NORM
        rows = torch.from_numpy(sample.last_rows)
        made.append(
            TrainingSample(sample.id, sample.tokens, sample.spans, wide.float(), last[rows], sample.last_rows)
        )
    drafter = make_drafter(dtype=torch.float32)
    fit_fc(drafter, made, NORM)
    sample = made[0]
    with torch.no_grad():
        guess = drafter.combine(sample.aux[2:5])
    wanted = sample.last[torch.from_numpy(np.searchsorted(sample.last_rows, [3, 4, 5]))] / NORM
    error = (guess.double() - wanted).norm() / wanted.norm()
    assert error < 0.02


def test_the_fit_stops_after_enough_rows():
    used = fit_fc(make_drafter(), (sample for sample, _ in samples()), NORM, max_rows=20)
    assert 20 <= used < 40


def test_first_weights_depend_on_seed_and_content_alone():
    source = MemorySource([sample for sample, _ in samples()])
    backwards = MemorySource([sample for sample, _ in samples()][::-1])
    states = []
    for chosen, seed in [(source, 0), (backwards, 0), (source, 1)]:
        drafter = make_drafter()
        used = give_first_weights(
            drafter,
            TrainSettings(seed=seed),
            make_vocabulary(),
            head=make_head(),
            norm_weight=NORM,
            samples=chosen,
        )
        assert used > 0
        states.append({name: value.clone() for name, value in drafter.state_dict().items()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["midlayer.mlp.up_proj.weight"], states[2]["midlayer.mlp.up_proj.weight"])


def test_head_alone():
    drafter = make_drafter()
    settings = TrainSettings(warm_start="head")
    arguments = {"head": make_head(), "norm_weight": NORM, "samples": MemorySource([])}
    assert give_first_weights(drafter, settings, make_vocabulary(), **arguments) == 0
    assert 0.015 < drafter.fc.weight.std() < 0.025


def test_refusals():
    with pytest.raises(DataError, match="supervised"):
        fit_fc(make_drafter(), [make_sample("s", 5, [(1, 2)], 0)[0]], NORM)
    wide = make_drafter(target_hidden_size=10)
    with pytest.raises(ConfigError, match="equally wide"):
        start_from_head(wide, make_head(hidden=10), torch.ones(10), make_vocabulary())


def test_column_sizes_change_neither_function_nor_plain_weights():
    """Powers of two: the checkpoint's weight is the same bits, whatever the parameters are."""
    drafter = make_drafter(dtype=torch.float32)
    aux = torch.randn(4, 3, 12)
    before, plain = drafter.combine(aux), drafter.state_dict()["fc.weight"].clone()
    sizes = torch.logspace(-3, 4, 36)
    sizes[5] = 0.0
    drafter.fc.set_sizes(sizes)
    assert not torch.equal(drafter.fc.weight, plain)
    assert torch.equal(drafter.state_dict()["fc.weight"], plain)
    assert torch.equal(drafter.combine(aux), before)
    ratio = drafter.fc.scale / sizes
    assert ((ratio > 0.7) & (ratio < 1.42))[sizes > 0].all()
    other = make_drafter(dtype=torch.float32, seed=1)
    other.load_state_dict(drafter.state_dict())
    assert torch.equal(other.fc.weight, plain)
    other.fc.set_sizes(sizes)
    other.load_state_dict(drafter.state_dict())
    assert torch.equal(other.fc.weight, drafter.fc.weight)


def test_the_first_weights_know_the_aux_states_sizes():
    made = []
    for sample, _ in samples():
        wide = sample.aux * torch.tensor([1.0, 64.0, 1e-3], dtype=torch.float64)[:, None]
        made.append(dataclasses.replace(sample, aux=wide))
    for warm_start in ("head", "head+ridge"):
        drafter = make_drafter()
        settings = TrainSettings(warm_start=warm_start)
        arguments = {"head": make_head(), "norm_weight": NORM, "samples": MemorySource(made)}
        assert give_first_weights(drafter, settings, make_vocabulary(), **arguments) > 0
        expected = torch.tensor([0.0, 6.0, -10.0], dtype=torch.float64).repeat_interleave(12)
        assert (drafter.fc.scale.log2() - expected).abs().max() <= 1
        if warm_start == "head":
            assert 0.015 < drafter.fc.weight.std() < 0.025
            with torch.no_grad():
                assert drafter.combine(made[0].aux).abs().max() < 1
