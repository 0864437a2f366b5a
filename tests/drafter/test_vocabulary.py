from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.base.errors import ConfigError, SealBroken
from eyas.drafter.vocabulary import DraftVocabulary, build_vocabulary, load_vocabulary, save_vocabulary


@st.composite
def counted(draw):
    counts = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=40)), dtype=np.int64)
    always = draw(st.sets(st.integers(0, len(counts) - 1), max_size=4))
    seen = {int(i) for i in np.flatnonzero(counts)} | always
    if not seen:
        counts[0] = 1
        seen = {0}
    return counts, always, draw(st.integers(max(1, len(always)), len(seen)))


@given(counted())
def test_the_most_frequent_and_the_special_ones(case):
    counts, always, size = case
    vocabulary = build_vocabulary(counts, size, always)
    ranked = sorted(range(len(counts)), key=lambda i: (-int(counts[i]), i))
    others = [i for i in ranked if i not in always and counts[i] > 0]
    expected = sorted(always | set(others[: size - len(always)]))
    assert vocabulary.target_ids.tolist() == expected


@given(counted())
def test_the_maps_are_one_to_one(case):
    counts, always, size = case
    vocabulary = build_vocabulary(counts, size, always)
    for draft_id in range(size):
        target_id = draft_id + vocabulary.d2t[draft_id]
        assert vocabulary.t2d[target_id]
        assert vocabulary.draft_ids[target_id] == draft_id
    assert vocabulary.t2d.sum() == size
    assert vocabulary.d2t.dtype == np.int64
    assert vocabulary.t2d.dtype == np.bool_
    assert ((vocabulary.draft_ids >= 0) == vocabulary.t2d).all()
    assert DraftVocabulary.from_offsets(vocabulary.d2t, len(counts)) == vocabulary


def test_size_zero_takes_what_was_seen():
    counts = np.array([0, 3, 0, 1, 2])
    assert build_vocabulary(counts, 0, [2]).target_ids.tolist() == [1, 2, 3, 4]
    many = np.ones(40_000, dtype=np.int64)
    many[39_999] = 9
    vocabulary = build_vocabulary(many, 0)
    assert vocabulary.size == 32_000
    assert vocabulary.target_ids[-1] == 39_999


def test_coverage():
    counts = np.array([6, 3, 1])
    assert build_vocabulary(counts, 2).coverage(counts) == 0.9


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [(4, [], "3 tokens that were seen"), (1, [0, 1], "no room"), (2, [9], "outside"), (2, [-1], "outside")],
)
def test_refusals(size, always, message):
    with pytest.raises(ConfigError, match=message):
        build_vocabulary(np.array([1, 1, 1, 0]), size, always)


def test_unsorted_or_foreign_ids_are_refused():
    for ids in ([1, 0], [0, 0], [-1, 2], [1, 5], []):
        with pytest.raises(ConfigError):
            DraftVocabulary(np.array(ids, dtype=np.int64), 5)


def test_saved_and_loaded(tmp_path):
    vocabulary = build_vocabulary(np.array([1, 0, 4, 2]), 2, [0])
    save_vocabulary(tmp_path / "v", vocabulary, {"seed": 1})
    assert load_vocabulary(tmp_path / "v") == vocabulary
    file = tmp_path / "v" / "vocabulary.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(SealBroken):
        load_vocabulary(tmp_path / "v")
