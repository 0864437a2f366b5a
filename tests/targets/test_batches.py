"""Batch plans."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.targets.batches import BatchPlan, plan_batches, plan_lengths

ITEMS = st.lists(st.integers(1, 60), max_size=40).map(lambda ls: [(f"s{i}", n) for i, n in enumerate(ls)])


def test_by_hand() -> None:
    items = [("a", 3), ("b", 10), ("c", 4), ("d", 10), ("e", 1)]
    assert plan_batches(items, 20) == [[1, 3], [2, 0, 4]]
    assert plan_batches(items, 19) == [[1], [3], [2, 0, 4]]
    assert plan_batches([("long", 99)], 10) == [[0]]
    assert plan_batches([], 10) == []


@given(ITEMS, st.integers(1, 200))
def test_every_item_once_and_within_budget(items: list[tuple[str, int]], budget: int) -> None:
    batches = plan_batches(items, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(items)))
    for batch in batches:
        longest = max(items[i][1] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


@given(ITEMS, st.integers(1, 200), st.integers(0, 9))
def test_the_plan_depends_on_content_alone(items: list[tuple[str, int]], budget: int, seed: int) -> None:
    shuffled = items[:]
    random.Random(seed).shuffle(shuffled)
    plans = [
        [[given[i] for i in batch] for batch in plan_batches(given, budget)] for given in (items, shuffled)
    ]
    assert plans[0] == plans[1]


def test_little_padding_on_real_lengths() -> None:
    draw = random.Random(1)
    lengths = np.array([min(2048, int(draw.lognormvariate(5.5, 0.7)) + 8) for _ in range(2000)])
    assert plan_lengths(lengths, 4096).padding_share(lengths) < 0.02
    assert BatchPlan(np.arange(3), np.array([0, 2, 3])).padding_share(np.array([4, 2, 3])) == pytest.approx(
        2 / 11
    )
    in_turn = BatchPlan(np.arange(2000), np.arange(0, 2001, 8))
    longest_first = np.concatenate([np.sort(lengths[i : i + 8])[::-1] for i in range(0, 2000, 8)])
    assert in_turn.padding_share(longest_first) > 0.3


@given(ITEMS, st.integers(1, 200), st.data())
def test_batches_with_a_wanted_item(items: list[tuple[str, int]], budget: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))
    plan = plan_lengths(np.array([length for _, length in items], dtype=np.int64), budget)
    expected = [batch.tolist() for batch in plan if any(wanted[index] for index in batch)]
    assert [batch.tolist() for batch in plan.with_any(np.array(wanted, dtype=bool))] == expected


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        plan_batches([("a", 1)], 0)
    with pytest.raises(ValueError, match="token"):
        plan_batches([("a", 0)], 5)
