from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import ConfigError, DataError
from eyas.drafter import attention, loss
from eyas.drafter.batch import TrainingSample, pack
from eyas.drafter.loss import LossTask, draft_loss
from eyas.drafter.model import EagleDrafter, RmsNorm
from eyas.drafter.teacher import Teacher
from tests.drafter.cases import (
    DRAFTS,
    make_drafter,
    make_head,
    make_sample,
    make_shape,
    make_vocabulary,
)
from tests.drafter.naive import NaiveDrafter, batch_loss

CPU = torch.device("cpu")
GAMMA = 0.7
SAMPLES = [
    (11, [(3, 9)]),
    (7, [(0, 7)]),
    (9, [(2, 4), (4, 9)]),
    (10, [(1, 5), (6, 10), (6, 10)]),
    (5, [(4, 5)]),  # nothing to draft
    (8, [(1, 6), (3, 8)]),
]


def build(norms, dtype, steps, cases=SAMPLES, kind="soft_ce"):
    made = [make_sample(f"s{i}", length, spans, 10 + i) for i, (length, spans) in enumerate(cases)]
    drafter = make_drafter(norms, dtype)
    batch = pack([sample for sample, _ in made], device=CPU, dtype=dtype, steps=steps)
    teacher = Teacher(make_head(), make_vocabulary(), device=CPU, dtype=dtype)
    return drafter, batch, teacher, [plain for _, plain in made]


def loss_of(drafter, batch, teacher, kind, steps):
    normaliser = None
    if kind in ("lk", "mixed"):
        normaliser = teacher.full_facts(batch.teacher).log_normaliser
    weights = [GAMMA**j / max(1, n) for j, n in enumerate(batch.num_supervised)]
    task = LossTask(kind, batch.kept, batch.teacher, teacher.draft_head, normaliser, weights)
    return draft_loss(drafter.unroll(batch, steps), drafter.lm_head.weight, task)


def naive_of(drafter):
    weights = {name: value.detach().double().requires_grad_() for name, value in drafter.named_parameters()}
    return NaiveDrafter(weights, drafter.shape, drafter.embedding.double())


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_logits_of_packed_samples_equal_the_naive_drafter(norms, dtype, tolerance):
    steps = 4
    drafter, batch, _, plain = build(norms, dtype, steps)
    naive = naive_of(drafter)
    expected = [[] for _ in range(steps)]
    for tokens, spans, aux, _ in plain:
        found = naive.logits(tokens, spans, aux, steps)
        for step in range(steps):
            expected[step] += [found[key] for key in sorted(found) if key[1] == step]
    with torch.no_grad():
        states = drafter.unroll(batch, steps)
        assert [len(state) for state in states] == [len(rows) for rows in expected]
        assert min(len(rows) for rows in expected) > 0
        for state, rows in zip(states, expected, strict=True):
            difference = drafter.logits(state).double() - torch.stack(rows)
            assert difference.abs().max() < tolerance


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", ["soft_ce", "kl", "lk", "mixed"])
@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_loss_and_gradients_equal_autograd_of_the_naive_drafter(norms, kind, dtype, tolerance):
    steps = 4
    drafter, batch, teacher, plain = build(norms, dtype, steps)
    naive = naive_of(drafter)
    ids = torch.from_numpy(teacher.vocabulary.target_ids)
    expected = batch_loss(naive, plain, make_head(), ids, kind, steps, GAMMA)
    expected.backward()
    found, _ = loss_of(drafter, batch, teacher, kind, steps)
    (3 * found).backward()
    assert abs(found.item() - expected.item()) < tolerance
    for name, parameter in drafter.named_parameters():
        wanted = 3 * naive.w[name].grad
        difference = (parameter.grad.double() - wanted).abs().max()
        assert difference < tolerance * max(1.0, wanted.abs().max().item()), name
        assert wanted.abs().max() > 0, name


@st.composite
def packings(draw):
    cases = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(2, 9))
        spans = draw(
            st.lists(st.tuples(st.integers(0, length), st.integers(0, length + 1)), min_size=1, max_size=3)
        )
        cases.append((length, spans))
    return cases


@settings(max_examples=25, deadline=None)
@given(packings(), st.integers(1, 5), st.sampled_from(["soft_ce", "mixed"]))
def test_any_spans_in_any_packing(cases, steps, kind):
    drafter, batch, teacher, plain = build("eagle3", torch.float64, steps, cases)
    ids = torch.from_numpy(teacher.vocabulary.target_ids)
    with torch.no_grad():
        expected = batch_loss(naive_of(drafter), plain, make_head(), ids, kind, steps, GAMMA)
    if batch is None:
        assert expected == 0
        return
    found, _ = loss_of(drafter, batch, teacher, kind, steps)
    found.backward()
    assert abs(found.item() - float(expected)) < 1e-9
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters())


def test_small_blocks_and_chunks_change_nothing(monkeypatch):
    drafter, batch, teacher, _ = build("eagle3", torch.float64, 3)
    whole, sums = loss_of(drafter, batch, teacher, "mixed", 3)
    whole.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    monkeypatch.setattr(attention, "BLOCK_QUERIES", {"blocks": 2, "flash": 2})
    monkeypatch.setitem(loss.CHUNK_ELEMENTS, "cpu", 3 * DRAFTS)
    monkeypatch.setattr(loss, "CACHE_ELEMENTS", 2 * DRAFTS)
    cut, cut_sums = loss_of(drafter, batch, teacher, "mixed", 3)
    cut.backward()
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cut_sums, sums, rtol=1e-12, atol=1e-12)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11)


def test_neighbours_in_a_batch_do_not_touch_each_other():
    drafter, batch, _, _ = build("eagle3", torch.float64, 3)
    together = drafter.unroll(batch, 3)
    offsets = [0, 0, 0]
    for i, (length, spans) in enumerate(SAMPLES):
        alone = pack(
            [make_sample(f"s{i}", length, spans, 10 + i)[0]], device=CPU, dtype=torch.float64, steps=3
        )
        if alone is None:
            continue
        for step, state in enumerate(drafter.unroll(alone, 3)):
            part = together[step][offsets[step] : offsets[step] + len(state)]
            torch.testing.assert_close(part, state, rtol=1e-12, atol=1e-12)
            offsets[step] += len(state)


def test_names_are_those_of_the_checkpoint_layout():
    names = set(make_drafter("eagle3").state_dict())
    layer = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    layer |= {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    expected = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert names == expected
    assert set(make_drafter("eagle3.1").state_dict()) == expected | {f"fc_norm.{i}.weight" for i in range(3)}


@pytest.mark.usefixtures("passes")
def test_bfloat16_comes_near():
    """Loss and gradients against the naive drafter in float64; eight bits of a number are a 256th."""
    drafter, _, teacher, plain = build("eagle3", torch.float32, 3)
    naive = naive_of(drafter)
    ids = torch.from_numpy(teacher.vocabulary.target_ids)
    exact = batch_loss(naive, plain, make_head(), ids, "soft_ce", 3, GAMMA)
    exact.backward()
    narrow_batch = build("eagle3", torch.bfloat16, 3)[1]
    narrow_teacher = Teacher(make_head(), make_vocabulary(), device=CPU, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = drafter.unroll(narrow_batch, 3)
    assert states[0].dtype == torch.bfloat16
    weights = [GAMMA**j / n for j, n in enumerate(narrow_batch.num_supervised)]
    task = LossTask(
        "soft_ce", narrow_batch.kept, narrow_batch.teacher, narrow_teacher.draft_head, None, weights
    )
    found, _ = draft_loss(states, drafter.lm_head.weight, task)
    found.backward()
    assert abs(found.item() - exact.item()) < 0.05 * exact.item()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.dtype == torch.float32
        wanted = naive.w[name].grad
        error = (parameter.grad.double() - wanted).norm() / wanted.norm()
        assert error < 0.1, name


def test_a_norm_in_bfloat16_is_that_of_its_numbers_in_float32_and_warns_of_nothing():
    norm = RmsNorm(64, 1e-5)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 64))
    narrow = norm.bfloat16()
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * narrow.weight.double()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = narrow(x)
    finally:
        torch.set_warn_always(False)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)


def test_an_embedding_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="embedding"):
        EagleDrafter(make_shape(), torch.zeros(22, 12))


def test_a_sample_without_a_needed_last_state_is_named():
    sample, _ = make_sample("lost", 9, [(2, 8)], 0)
    cut = TrainingSample(
        "lost", sample.tokens, sample.spans, sample.aux, sample.last[:-1], sample.last_rows[:-1]
    )
    with pytest.raises(DataError, match="last states") as caught:
        pack([sample, cut], device=CPU, dtype=torch.float64, steps=2)
    assert "lost" in str(caught.value)
    doubled = TrainingSample(
        "odd", sample.tokens, sample.spans, sample.aux, sample.last[1:], sample.last_rows
    )
    with pytest.raises(DataError, match="differ in number"):
        pack([doubled], device=CPU, dtype=torch.float64, steps=2)


@pytest.mark.usefixtures("passes")
def test_of_more_last_states_than_needed_the_needed_ones_are_taken():
    """Two answers of a sample whose last states are all there: their teacher rows lie apart."""
    sample, (_, _, aux, last) = make_sample("all", 20, [(3, 8), (12, 17)], 0)
    whole = TrainingSample(
        "all", sample.tokens, sample.spans, sample.aux, torch.as_tensor(last), np.arange(20)
    )
    batch = pack([sample, whole], device=CPU, dtype=torch.float32, steps=2)
    rows = [3, 4, 5, 6, 12, 13, 14, 15]
    wanted = torch.as_tensor(last)[rows].float()
    assert torch.equal(batch.teacher, torch.cat([wanted, wanted]))
    assert torch.equal(batch.aux, torch.as_tensor(aux)[:15].float().repeat(2, 1, 1))


def test_rows_behind_the_last_supervised_one_are_left_out():
    sample, _ = make_sample("tail", 20, [(3, 8)], 0)
    batch = pack([sample], device=CPU, dtype=torch.float64, steps=2)
    assert len(batch.aux) == 6
    assert batch.num_tokens == 20
    assert np.array_equal(batch.query_rows, [2, 3, 4, 5])
