from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.base.stop import StopFlag
from eyas.drafter.metrics import walk
from eyas.drafter.passes import BatchPasses
from eyas.drafter.settings import TrainSettings
from eyas.drafter.teacher import Teacher
from tests.drafter.cases import DRAFTS, MemorySource, make_drafter, make_head, make_sample, make_vocabulary
from tests.drafter.naive import NaiveDrafter, row_loss

CASES = [(17, [(3, 14)]), (12, [(0, 6), (6, 12)]), (9, [(2, 9)]), (6, [(5, 6)]), (14, [(1, 13)])]
STEPS = 3


@pytest.mark.parametrize("batch_tokens", [20, 1000])
def test_validation_equals_a_count_by_hand(batch_tokens):
    """The target mostly says its favourite, sometimes a token that cannot be drafted."""
    vocabulary = make_vocabulary()
    favourite, other = int(vocabulary.target_ids[3]), int(np.flatnonzero(~vocabulary.t2d)[0])
    head = make_head()
    head[favourite, 0], head[other, 1] = 8.0, 8.0
    drafter = make_drafter()
    with torch.no_grad():  # drafts are the favourite or its opposite, by the sign of one sum
        drafter.lm_head.weight[3] = -9.0
        drafter.lm_head.weight[4] = 9.0
    made = []
    for i, (length, spans) in enumerate(CASES):
        sample, plain = make_sample(f"s{i}", length, spans, 50 + i)
        plain[3][:, 0] += 2.0
        sample.last[:, 0] += 2.0
        tops = (plain[3] @ head.T).argmax(1)
        tokens = np.array(plain[0])
        tokens[1:] = tops[:-1].numpy()  # a greedy answer
        sample = type(sample)(sample.id, tokens, sample.spans, sample.aux, sample.last, sample.last_rows)
        made.append((sample, (tokens.tolist(), *plain[1:])))
    naive = NaiveDrafter(dict(drafter.named_parameters()), drafter.shape, drafter.embedding)
    ids = torch.from_numpy(vocabulary.target_ids)
    hits, losses, acceptance, rounds, accepted, missed = {}, {}, {}, 0, 0, 0
    for number, (_, (tokens, spans, aux, last)) in enumerate(made):
        with torch.no_grad():
            found = naive.logits(tokens, spans, aux, STEPS)
        for (row, step), logits in found.items():
            target = head @ last[row + 1 + step]
            key = number, row, step
            hits[key] = int(ids[logits.argmax()]) == int(target.argmax())
            missed += int(target.argmax()) not in vocabulary.target_ids
            losses[key] = float(row_loss("soft_ce", logits, target, ids))
            real = torch.softmax(target, 0)[ids]
            acceptance[key] = float(torch.minimum(torch.softmax(logits, 0), real).sum())
        for start, end in spans:
            row = max(start - 1, 0)
            while row + 2 < end:
                rounds += 1
                count = 0
                while count < STEPS and hits.get((number, row, count), False):
                    count += 1
                accepted += count
                row += count + 1
    assert missed > 0
    passes = BatchPasses(
        drafter,
        Teacher(head, vocabulary, device=torch.device("cpu"), dtype=torch.float64),
        TrainSettings(steps=STEPS, dtype="float64", batch_tokens=batch_tokens),
    )
    summary = passes.validate(MemorySource([s for s, _ in made]), StopFlag()).summary()
    conditional = []
    for step in range(STEPS):
        keys = [key for key in hits if key[2] == step]
        assert summary["rows"][step] == len(keys)
        assert summary["top1"][step] == pytest.approx(sum(hits[k] for k in keys) / len(keys))
        assert summary["loss"][step] == pytest.approx(sum(losses[k] for k in keys) / len(keys))
        assert summary["acceptance"][step] == pytest.approx(sum(acceptance[k] for k in keys) / len(keys))
        reached = [k for k in keys if all(hits[k[0], k[1], j] for j in range(step))]
        conditional.append(sum(hits[k] for k in reached) / len(reached))
    assert min(conditional) > 0
    assert max(conditional) < 1
    assert summary["conditional"] == pytest.approx(conditional)
    a, b, c = conditional
    assert summary["predicted_tau"] == pytest.approx([1 + a, 1 + a + a * b, 1 + a + a * b + a * b * c])
    assert summary["walk_tau"] == pytest.approx(1 + accepted / rounds)
    assert len(drafter.lm_head.weight) == DRAFTS


def test_walks_by_hand():
    def steps(*rows):
        return np.array([[bool(int(x)) for x in row] for row in rows])

    assert walk(steps("0000", "0000")) == (4, 0)
    assert walk(steps("111111", "111110")) == (2, 4)
    assert walk(steps("101", "010")) == (2, 2)
    assert walk(steps("1011", "0110")) == (2, 3)
    assert walk(steps("", "")) == (0, 0)


def test_a_stop_ends_validation_without_numbers():
    flag = StopFlag()
    flag.request(2)
    passes = BatchPasses(
        make_drafter(),
        Teacher(make_head(), make_vocabulary(), device=torch.device("cpu"), dtype=torch.float64),
        TrainSettings(steps=2, dtype="float64"),
    )
    assert passes.validate(MemorySource([make_sample("s", 9, [(2, 9)], 0)[0]]), flag) is None
