"""Predicted acceptance lengths against the naive drafter walking row by row."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.base.stop import StopFlag
from eyas.drafter.prediction import predict, walk_counts
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
            assert tuple(found[sample.id][:, chain - 1]) == wanted
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
