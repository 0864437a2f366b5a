"""Replaying stored answers counts what decoding with the target counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.base.errors import Stopped
from eyas.base.stop import StopFlag
from eyas.drafter.batch import TrainingSample
from eyas.drafter.replay import replay_counts
from eyas.drafter.speculate import DecodeSettings, decode
from eyas.drafter.tree import TreeShape
from tests.drafter.cases import MemorySource
from tests.drafter.fake_target import FakeTarget
from tests.drafter.test_speculate import LAYERS, PROMPTS, plain_greedy
from tests.drafter.test_tree import drafting_for

WAYS = (2, 4, TreeShape(3, 2, 5), TreeShape(4, 3, 15))


def stored(target, name, prompt, answer):
    """A sample with the states that the target has along it."""
    tokens = [*prompt, *answer]
    session = target.session(1)
    output = session.forward(torch.tensor([tokens]), None, logits="all", aux_layers=LAYERS)
    last = torch.zeros(0, 12)
    spans = ((len(prompt), len(tokens)),)
    rows = np.zeros(0, dtype=np.int64)
    return TrainingSample(name, np.array(tokens), spans, output.aux[0], last, rows)


@pytest.mark.parametrize("ends", [frozenset(), frozenset({4})])
def test_rounds_and_accepted_drafts_are_those_of_decoding(ends):
    target, limits = FakeTarget(5, seed=5), [1, 2, 5, 9, 19, 30]
    samples, expected = [], {}
    for number, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        answer, reason = plain_greedy(target, prompt, limit, ends)
        samples.append(stored(target, f"s{number}", prompt, answer))
        expected[f"s{number}"] = []
        for way in WAYS:
            # an answer that ends at its limit cannot be told from one that was meant to; others ran on
            longest = limit if reason == "length" else 99
            settings = DecodeSettings(longest, ends)
            (found,) = decode(target.session(1), [prompt], settings, drafting_for(5, 4, way))
            assert found.tokens == answer
            expected[f"s{number}"].append((found.counts.rounds, sum(found.counts.accepted)))
    ways = [drafting_for(5, 4, way) for way in WAYS]
    found = replay_counts(ways, MemorySource(samples), end_tokens=ends, batch_tokens=40, stop=StopFlag())
    assert {name: [tuple(pair) for pair in counts.T] for name, counts in found.items()} == expected
    assert sum(accepted for pairs in expected.values() for _, accepted in pairs) > 10


def test_a_stop():
    target = FakeTarget(5)
    source = MemorySource([stored(target, "s", [1, 2], [3, 1, 2])])
    flag = StopFlag()
    flag.request(15)
    with pytest.raises(Stopped):
        replay_counts([drafting_for(5, 4, 2)], source, end_tokens=frozenset(), batch_tokens=40, stop=flag)
