from __future__ import annotations

import pytest
import torch

from eyas.drafter.batch import pack
from eyas.drafter.cache import DraftCache
from tests.drafter.cases import make_drafter, make_sample

STEPS = 4
CASES = [(11, [(3, 10)]), (9, [(0, 9)]), (12, [(1, 6), (7, 12)])]


def training_logits(drafter, sample):
    """{(row, step): draft logits} of the training path."""
    batch = pack([sample], device=torch.device("cpu"), dtype=torch.float64, steps=STEPS)
    found = {}
    with torch.no_grad():
        for step, state in enumerate(drafter.unroll(batch, STEPS)):
            rows = batch.query_rows[batch.kept[step]]
            found.update({(int(row), step): drafter.logits(state[i]) for i, row in enumerate(rows)})
    return found


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize(("length", "spans"), CASES)
def test_teacher_forced_steps_equal_drafting_from_the_prefix(norms, length, spans):
    drafter = make_drafter(norms)
    sample, (tokens, _, aux, _) = make_sample("s", length, spans, 3)
    expected = training_logits(drafter, sample)
    assert {step for _, step in expected} == set(range(STEPS))
    for row in {row for row, _ in expected}:
        cache = DraftCache(drafter, 1)
        logits = cache.extend(
            aux[None, : row + 1], torch.tensor([tokens[1 : row + 2]]), torch.tensor([row + 1])
        )
        for step in range(STEPS):
            if (row, step) in expected:
                torch.testing.assert_close(logits[0], expected[row, step], rtol=0, atol=1e-9)
            if row + 2 + step >= length:
                break
            logits = cache.draft(torch.tensor([tokens[row + 2 + step]]))


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_ragged_batches_rounds_and_dropped_rows(norms):
    """Three answers of different length, extended unevenly, drafts between, one dropped."""
    drafter = make_drafter(norms)
    made = [make_sample(f"s{i}", 60 + i, [(1, 60)], i) for i in range(3)]
    expected = [training_logits(drafter, sample) for sample, _ in made]
    cache = DraftCache(drafter, 3)
    live, have = [0, 1, 2], [0, 0, 0]
    for number, sizes in enumerate([(3, 1, 5), (1, 4, 2), (2, 1, 1), (1, 3, 3), (30, 31, 9), (4, 4, 4)]):
        if number == 3:
            live = [0, 2]
            cache.keep(torch.tensor(live))
        sizes = [sizes[i] for i in live]
        aux = torch.full((len(live), max(sizes), 3, 12), 7.0, dtype=torch.float64)
        tokens = torch.zeros(len(live), max(sizes), dtype=torch.long)
        for place, i in enumerate(live):
            plain, first = made[i][1], have[i]
            aux[place, : sizes[place]] = plain[2][first : first + sizes[place]]
            following = plain[0][first + 1 : first + 1 + sizes[place]]
            tokens[place, : sizes[place]] = torch.tensor(following)
            have[i] += sizes[place]
        logits = cache.extend(aux, tokens, torch.tensor(sizes))
        for step in range(3):
            for place, i in enumerate(live):
                wanted = expected[i][have[i] - 1, step]
                torch.testing.assert_close(logits[place], wanted, rtol=0, atol=1e-9)
            logits = cache.draft(torch.tensor([made[i][1][0][have[i] + 1 + step] for i in live]))
