"""Limits, shares, duplicates and the split."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import ConfigError
from eyas.chat.mixture import (
    DUPLICATE,
    OVER_LIMIT,
    OVER_SHARE,
    SourceKeys,
    Splitter,
    choose,
    seeded_number,
    within_shares,
)


def source(name: str, keys: list[bytes], limit: int | None = None, share: float | None = None) -> SourceKeys:
    made = SourceKeys(name, limit, share)
    for line, key in enumerate(keys, start=1):
        made.add(line, key)
    return made


def kept(made: SourceKeys, left_out: dict[int, str]) -> set[bytes]:
    return {key for line, key in zip(made.lines, made.keys, strict=True) if line not in left_out}


def keys(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{i}".encode() for i in range(count)]


def test_duplicates_stay_where_they_come_first():
    a, b = source("a", [b"1", b"2", b"1"]), source("b", [b"2", b"3"])
    assert choose([a, b], 0) == [{3: DUPLICATE}, {1: DUPLICATE}]


def test_a_limit_takes_the_same_records_in_any_order_and_not_the_first():
    content = keys("k", 200)
    first = source("a", content, limit=20)
    chosen = kept(first, choose([first], 7)[0])
    shuffled = content.copy()
    random.Random(1).shuffle(shuffled)
    second = source("a", shuffled, limit=20)
    assert kept(second, choose([second], 7)[0]) == chosen
    assert len(chosen) == 20
    assert chosen != set(content[:20])
    other = source("a", content, limit=20)
    assert kept(other, choose([other], 8)[0]) != chosen


def test_what_an_earlier_source_gave_does_not_use_up_a_later_limit():
    a, b = source("a", keys("k", 5)), source("b", keys("k", 10), limit=5)
    out = choose([a, b], 0)
    assert kept(b, out[1]) == set(keys("k", 10)[5:])
    assert sorted(out[1].values()) == [DUPLICATE] * 5


def test_what_an_earlier_limit_left_out_may_come_from_a_later_source():
    a, b = source("a", keys("k", 10), limit=3), source("b", keys("k", 10))
    out = choose([a, b], 0)
    assert len(kept(a, out[0])) == 3
    assert kept(a, out[0]) | kept(b, out[1]) == set(keys("k", 10))
    assert list(out[0].values()) == [OVER_LIMIT] * 7


def test_a_share_counts_in_the_finished_mixture():
    a, b = source("a", keys("a", 300)), source("b", keys("b", 300), share=0.25)
    out = choose([a, b], 0)
    assert len(kept(b, out[1])) == 100  # 100 of 400
    assert set(out[1].values()) == {OVER_SHARE}


def test_a_share_is_not_short_by_rounding():
    assert within_shares([71, 40], [None, 0.29]) == [71, 29]


def test_shares_that_leave_nothing_are_refused():
    with pytest.raises(ConfigError, match="leave no record"):
        choose([source("a", keys("a", 10), share=0.5)], 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([None, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])),
        min_size=1,
        max_size=3,
    )
)
def test_shares_against_brute_force(sources: list[tuple[int, float | None]]):
    counts, shares = [c for c, _ in sources], [s for _, s in sources]
    best = max(
        (
            candidate
            for candidate in itertools.product(*(range(c + 1) for c in counts))
            if all(
                s is None or have <= s * sum(candidate) + 1e-9
                for have, s in zip(candidate, shares, strict=True)
            )
        ),
        key=sum,
    )
    found = within_shares(counts, shares)
    assert sum(found) == sum(best)
    assert all(s is None or have <= s * sum(found) + 1e-9 for have, s in zip(found, shares, strict=True))


def split_all(fraction: float, seed: int, items: list[bytes]) -> dict[bytes, str]:
    splitter: Splitter[bytes] = Splitter(fraction, seed)
    out = []
    for item in items:
        out += list(splitter.push(item, item))
    out += list(splitter.finish())
    assert sorted(item for item, _ in out) == sorted(items)
    return {item: str(split) for item, split in out}


@settings(max_examples=300, deadline=None)
@given(
    st.floats(0, 1), st.integers(0, 5), st.sets(st.binary(min_size=1, max_size=3), max_size=12), st.randoms()
)
def test_the_split(fraction: float, seed: int, content: set[bytes], shuffle: random.Random):
    items = sorted(content)
    sides = split_all(fraction, seed, items)
    shuffle.shuffle(items)
    assert split_all(fraction, seed, items) == sides, "the order of the input decides nothing"
    have = set(sides.values())
    if fraction == 0:
        assert have <= {"train"}
    elif fraction == 1:
        assert have <= {"validation"}
    elif len(items) >= 2:
        assert have == {"train", "validation"}
    by_number = {i: seeded_number(seed, "split", i) < fraction for i in items}
    if len(set(by_number.values())) == 2:
        assert {i: s == "validation" for i, s in sides.items()} == by_number
    elif 0 < fraction < 1 and len(items) >= 2:
        changed = [i for i in items if (sides[i] == "validation") != by_number[i]]
        assert len(changed) == 1, "one alone goes to the empty side"
        nearest = min(items, key=lambda i: abs(seeded_number(seed, "split", i) - fraction))
        assert changed == [nearest]


def test_the_fraction_is_met():
    sides = split_all(0.1, 0, keys("k", 5000))
    assert 400 < list(sides.values()).count("validation") < 600


def test_one_conversation_alone_trains():
    assert split_all(0.999, 0, [b"x"]) == {b"x": "train"}
