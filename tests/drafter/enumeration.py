"""Sampled answers against the exact probability of every answer, by enumeration on a small vocabulary."""

from __future__ import annotations

import itertools
import math

import pytest

from eyas.drafter.speculate import DecodeSettings, Drafting, decode
from tests.drafter.fake_target import FakeTarget

VOCAB, END, LENGTH, SEEDS, TEMPERATURE = 4, 3, 4, 6000, 0.8


def require_the_targets_distribution(drafting: Drafting | None) -> int:
    """Chi-square over all answers of four tokens or to the end token, 6,000 seeds; gives accepted drafts."""
    target = FakeTarget(VOCAB, seed=1)
    expected = {}
    for length in range(1, LENGTH + 1):
        for answer in itertools.product(range(VOCAB), repeat=length):
            if END in answer[:-1] or (length < LENGTH and answer[-1] != END):
                continue
            steps = (
                float(target.distribution([1, 2, *answer[:place]], TEMPERATURE)[token])
                for place, token in enumerate(answer)
            )
            expected[answer] = math.prod(steps)
    assert sum(expected.values()) == pytest.approx(1)
    settings = DecodeSettings(LENGTH, frozenset({END}), TEMPERATURE, seeds=range(SEEDS))
    answers = decode(target.session(SEEDS), [[1, 2]] * SEEDS, settings, drafting)
    counts = dict.fromkeys(expected, 0)
    for answer in answers:
        counts[tuple(answer.tokens)] += 1
    large = [a for a in expected if expected[a] * SEEDS >= 5]
    statistic = sum((counts[a] - expected[a] * SEEDS) ** 2 / (expected[a] * SEEDS) for a in large)
    freedom = len(large) - 1
    assert freedom > 20
    # chi-square is near normal at this many cells: five standard deviations
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    return sum(sum(a.counts.accepted) for a in answers)
