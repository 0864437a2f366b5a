"""Predicted acceptance lengths against the naive drafter walking row by row."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.base.stop import StopFlag
from eyas.drafter.metrics import walk
from eyas.drafter.prediction import (
    PLACES,
    predict,
    predict_by,
    predict_by_place,
    stretch_of,
    walk_counts,
    walked,
)
from tests.drafter.cases import MemorySource, make_drafter, make_sample, make_vocabulary
from tests.drafter.naive import NaiveDrafter

DRAFTS = 4


def naive_counts(naive, target_ids, tokens, spans, aux, chain):
    """Rounds and accepted drafts of one sample, each answer walked by itself."""
    logits = naive.logits(tokens, spans, aux, chain)
    rounds = accepted = 0
    for start, _ in spans:
        row = max(start - 1, 0)
        while (row, 0) in logits:
            count = 0
            while count < chain and (row, count) in logits:
                draft = int(target_ids[int(logits[row, count].argmax())])
                if draft != tokens[row + 2 + count]:
                    break
                count += 1
            rounds += 1
            accepted += count
            row += count + 1
    return rounds, accepted


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_walks_equal_the_naive_drafters(norms):
    drafter, vocabulary = make_drafter(norms), make_vocabulary()
    naive = NaiveDrafter(drafter.state_dict(), drafter.shape, drafter.embedding)
    made = []
    for i in range(12):
        sample, form = make_sample(f"s{i}", 16, [(1, 6), (8, 16)], i)
        tokens, spans, aux, _ = form
        # stored tokens follow the drafter half of the time, so that chains of every length occur
        for row, step in sorted(naive.logits(tokens, spans, aux, 1)):
            if (row + i) % 3:
                draft = int(naive.logits(tokens, spans, aux, 1)[row, step].argmax())
                tokens[row + 2] = int(vocabulary.target_ids[draft])
        sample.tokens[:] = tokens
        made.append((sample, form))
    found = walk_counts(
        drafter,
        vocabulary,
        MemorySource([sample for sample, _ in made]),
        max_drafts=DRAFTS,
        batch_tokens=40,
        stop=StopFlag(),
    )
    total = 0
    for sample, (tokens, spans, aux, _) in made:
        for chain in range(1, DRAFTS + 1):
            wanted = naive_counts(naive, vocabulary.target_ids, tokens, spans, aux, chain)
            assert tuple(found[sample.id].sum(axis=0)[:, chain - 1]) == wanted
            total += wanted[1]
    assert total > 100


def test_the_whole_and_its_interval():
    """Ratios of sums, and an interval as wide as the delta method says for many conversations."""
    rng = np.random.default_rng(7)
    rounds = rng.integers(20, 40, size=400)
    accepted = rng.binomial(rounds, 0.5) + rng.integers(0, 8, size=400)
    counts = {f"s{i}": np.array([[rounds[i]], [accepted[i]]]) for i in range(400)}
    one = predict(counts, {f"s{i}": f"c{i}" for i in range(400)})[0]
    ratio = accepted.sum() / rounds.sum()
    assert one.num_drafts == 1
    assert one.acceptance_length == pytest.approx(1 + ratio)
    spread = np.sqrt(((accepted - ratio * rounds) ** 2).sum()) / rounds.sum()
    assert one.high - one.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    assert one.low < 1 + ratio < one.high


def test_samples_of_one_conversation_are_drawn_together():
    counts = {f"s{i}": np.array([[10], [i % 2 * 10]]) for i in range(40)}
    apart = predict(counts, {name: name for name in counts})[0]
    together = predict(counts, {f"s{i}": f"c{i // 2}" for i in range(40)})[0]
    assert together.low == together.high == together.acceptance_length == apart.acceptance_length
    assert apart.high - apart.low > 0.1
    assert predict({}, {}) == []


def test_rounds_by_place_are_those_of_the_walk():
    rng = np.random.default_rng(3)
    for num_rows in (0, 1, 5, 40):
        followed = rng.random((3, num_rows)) < 0.6
        rounds = list(walked(followed))
        assert (len(rounds), sum(accepted for _, accepted in rounds)) == walk(followed)
        place = 0
        for found, accepted in rounds:
            assert found == place
            assert followed[:accepted, found].all()
            assert accepted == 3 or not followed[accepted, found]
            place += accepted + 1
    assert [stretch_of(place) for place in (0, 31, 32, 127, 128, 511, 512, 9999)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_by_label_and_by_place():
    """Domain a accepts everything, b nothing; answers of a reach the second stretch."""
    counts = {}
    for i in range(8):
        counts[f"s{i}"] = np.zeros((len(PLACES), 2, 1), dtype=np.int64)
        counts[f"s{i}"][0] = [[10], [10 if i % 2 else 0]]
        counts[f"s{i}"][1] = [[i % 2 * 6], [i % 2 * 3]]
    groups = {name: name for name in counts}
    labels = {f"s{i}": "a" if i % 2 else "b" for i in range(8)}
    by_domain = predict_by(counts, groups, labels)
    assert {name: rows[0].acceptance_length for name, rows in by_domain.items()} == {"a": 1 + 13 / 16, "b": 1}
    by_place = predict_by_place(counts, groups)
    assert [(begin, rows[0].acceptance_length) for begin, rows in by_place] == [(0, 1.5), (32, 1.5)]
    assert by_place[1][1][0].low == by_place[1][1][0].high
    assert predict(counts, groups)[0].acceptance_length == pytest.approx(1 + 52 / 104)
