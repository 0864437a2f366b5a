from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.schedule import TrainingPlan, epoch_order, learning_rate, pack_by_tokens
from eyas.drafter.settings import TrainSettings


def test_the_rate_rises_and_falls():
    rates = [learning_rate(i, 101, peak=2.0, warmup=0.1, min_ratio=0.1) for i in range(101)]
    rising = math.ceil(101 * 0.1)
    assert rates[0] == pytest.approx(2.0 / rising)
    assert max(rates) == rates[rising] == pytest.approx(2.0)
    assert all(b > a for a, b in pairwise(rates[:rising]))
    assert all(b < a for a, b in pairwise(rates[rising:]))
    assert rates[-1] == pytest.approx(0.2)
    assert rates[rising + (100 - rising) // 2] == pytest.approx(1.1, rel=0.02)


def test_without_warmup_and_with_one_step():
    assert learning_rate(0, 1, peak=3.0, warmup=0.0, min_ratio=0.5) == 3.0
    assert learning_rate(0, 1, peak=3.0, warmup=1.0, min_ratio=0.5) == 3.0


def test_a_stable_rate_falls_at_the_end():
    rates = [
        learning_rate(i, 200, peak=2.0, warmup=0.05, min_ratio=0.1, schedule="wsd", decay=0.25)
        for i in range(200)
    ]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10:150] == [2.0] * 140
    assert all(b < a for a, b in pairwise(rates[149:]))
    assert rates[-1] == pytest.approx(0.2)
    # a quarter of the way down, one minus a square root has fallen by half
    assert rates[149 + 50 // 4] == pytest.approx(0.2 + 1.8 * 0.5, rel=0.02)


def test_settings_give_their_own_rate():
    settings = TrainSettings(lr=2.0, warmup=0.05, min_lr_ratio=0.1, schedule="wsd", decay=0.25)
    # by hand: ten steps up, flat to step 149, and a quarter of the way down half of the fall
    assert [settings.rate(i, 200) for i in (0, 9, 10, 149)] == pytest.approx([0.2, 2.0, 2.0, 2.0])
    assert settings.rate(149 + 50 // 4, 200) == pytest.approx(0.2 + 1.8 * 0.5, rel=0.02)
    assert settings.rate(199, 200) == pytest.approx(0.2)


def test_a_decay_longer_than_what_is_left_begins_after_the_rise():
    rates = [
        learning_rate(i, 20, peak=1.0, warmup=0.5, min_ratio=0.0, schedule="wsd", decay=1.0)
        for i in range(20)
    ]
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[-1] == 0.0
    assert all(b < a for a, b in pairwise(rates[10:]))


IDS = st.dictionaries(st.text("abcdef", min_size=1, max_size=5), st.integers(1, 30), min_size=1, max_size=30)


@given(IDS, st.integers(0, 3), st.integers(0, 3))
def test_order_depends_on_content_alone(lengths, seed, epoch):
    ids = list(lengths)
    order = epoch_order(ids, seed, epoch)
    assert sorted(order) == sorted(ids)
    assert epoch_order(ids[::-1], seed, epoch) == order
    assert epoch_order(ids[1:], seed, epoch) == [x for x in order if x != ids[0]]


def test_epochs_and_seeds_shuffle():
    ids = [f"s{i}" for i in range(50)]
    orders = {tuple(epoch_order(ids, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(IDS, st.integers(1, 40))
def test_packing_keeps_order_and_budget(lengths, budget):
    ids = sorted(lengths)
    batches = pack_by_tokens(ids, lengths, budget)
    assert [x for batch in batches for x in batch] == ids
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[x] for x in batch) <= budget
    for one, following in pairwise(batches):
        assert sum(lengths[x] for x in one) + lengths[following[0]] > budget


@given(IDS, st.sampled_from([0.25, 1.0, 1.5, 3.0]), st.integers(1, 3))
def test_each_epoch_sees_every_sample_once(lengths, epochs, accumulate):
    plan = TrainingPlan(lengths, epochs=epochs, batch_tokens=40, accumulate=accumulate, seed=1)
    seen = {}
    for step in plan.steps:
        assert 1 <= len(step.batches) <= accumulate
        seen.setdefault(step.epoch, []).extend(x for batch in step.batches for x in batch)
    for epoch in range(math.floor(epochs)):
        assert sorted(seen[epoch]) == sorted(lengths)
    if epochs % 1:
        part = sum(lengths[x] for x in seen[math.floor(epochs)])
        total = sum(lengths.values())
        assert (epochs % 1) * total <= part < (epochs % 1) * total + 40
        order = epoch_order(list(lengths), 1, math.floor(epochs))
        assert seen[math.floor(epochs)] == order[: len(seen[math.floor(epochs)])]


def test_validations_are_spread_and_end_at_the_end():
    plan = TrainingPlan({f"s{i}": 10 for i in range(10)}, epochs=1, batch_tokens=10, accumulate=1, seed=0)
    assert plan.validation_steps(3) == {4, 7, 10}
    assert plan.validation_steps(99) == set(range(1, 11))
