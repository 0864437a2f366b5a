"""Generation against plain loops."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from eyas.base.errors import Stopped, TargetError
from eyas.base.stop import StopFlag
from eyas.targets.local.generate import Generated, SamplingSettings, generate
from eyas.targets.local.model import LocalTarget
from eyas.targets.local.sampling import RowSampler, nucleus
from tests.tiny import VOCAB_SIZE, save_tiny_target

PROMPTS = [
    [random.Random(row).randrange(VOCAB_SIZE) for _ in range(n)] for row, n in enumerate((3, 17, 8, 1, 30, 9))
]


@pytest.fixture(scope="module", params=["llama", "deepseek_v3", "recurrent"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    folder: Path = save_tiny_target(tmp_path_factory.mktemp("model"), request.param, dtype="float64")
    return LocalTarget.load(folder, dtype="float64")


def plain_greedy(target: LocalTarget, prompt: list[int], limit: int, ends: tuple[int, ...]) -> Generated:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < limit:
        with torch.no_grad():
            tokens.append(int(target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in ends:
            return Generated(tokens[len(prompt) :], "stop")
    return Generated(tokens[len(prompt) :], "length")


def test_greedy_equals_a_plain_loop(target: LocalTarget) -> None:
    free = generate(target, PROMPTS, SamplingSettings(14, []))
    ends = (free[1].tokens[4], free[4].tokens[9])  # tokens that do come up
    limits = [14, 10, 14, 1, 14, 6]
    found = generate(target, PROMPTS, SamplingSettings(limits, ends))
    assert found == [plain_greedy(target, p, n, ends) for p, n in zip(PROMPTS, limits, strict=True)]
    assert {answer.finish_reason for answer in found} == {"stop", "length"}
    assert any(len(answer.tokens) == limit for answer, limit in zip(found, limits, strict=True))
    stopped = next(answer for answer in found if answer.finish_reason == "stop")
    assert stopped.tokens[-1] in ends


def sampled(seeds: list[int], **changes: object) -> SamplingSettings:
    return SamplingSettings(12, [2, 0], temperature=0.9, top_p=0.8, seeds=seeds, **changes)  # type: ignore[arg-type]


def test_an_answer_does_not_depend_on_its_group(target: LocalTarget) -> None:
    seeds = [11, 12, 13, 14, 15, 16]
    together = generate(target, PROMPTS, sampled(seeds))
    assert together == generate(target, PROMPTS, sampled(seeds), prefill_tokens=9)
    for rows in ([4, 0], [3], [5, 2, 1, 0]):
        group = generate(target, [PROMPTS[r] for r in rows], sampled([seeds[r] for r in rows]))
        assert group == [together[r] for r in rows]
    other = generate(target, PROMPTS, sampled([seed + 100 for seed in seeds]))
    assert sum(a != b for a, b in zip(together, other, strict=True)) >= 4


def test_a_group_repeats_bit_for_bit_in_float32(tmp_path: Path) -> None:
    target = LocalTarget.load(save_tiny_target(tmp_path))
    settings = SamplingSettings(30, [], temperature=1.0, seeds=range(6))
    assert generate(target, PROMPTS, settings) == generate(target, PROMPTS, settings)


def test_no_row_of_a_finished_answer_is_computed_for_long(target: LocalTarget) -> None:
    rows: list[int] = []
    handle = target.structure.head.register_forward_hook(lambda m, a, o: rows.append(o.shape[0]))
    generate(target, PROMPTS, SamplingSettings([1, 2, 3, 4, 5, 6], []))
    handle.remove()
    assert rows[-6:] == [6, 5, 4, 3, 2, 1]


def test_stop_between_steps(target: LocalTarget) -> None:
    flag = StopFlag()
    steps: list[int] = []

    def count(*_: object) -> None:
        steps.append(1)
        if len(steps) == 3:
            flag.request(15)

    target.session(1)  # its own checks run the head too
    handle = target.structure.head.register_forward_hook(count)
    with pytest.raises(Stopped) as stopped:
        generate(target, PROMPTS, SamplingSettings(50, []), flag)
    handle.remove()
    assert stopped.value.exit_code == 143
    assert len(steps) == 3


def test_what_is_refused(target: LocalTarget) -> None:
    for settings, match in (
        (SamplingSettings(0, []), "max_new_tokens"),
        (SamplingSettings([3], []), "max_new_tokens"),
        (SamplingSettings(3, [], temperature=-1), "temperature"),
        (SamplingSettings(3, [], top_p=0), "top_p"),
        (SamplingSettings(3, [], temperature=1, seeds=[1]), "seed"),
    ):
        with pytest.raises(TargetError, match=match):
            generate(target, PROMPTS[:2], settings)
    with pytest.raises(TargetError, match="without tokens"):
        generate(target, [[1], []], SamplingSettings(3, []))
    assert generate(target, [], SamplingSettings(3, [])) == []


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    expected = torch.softmax(logits[0].double() / 0.7, 0).tolist()
    sampler = RowSampler(0.7, 1.0, [5])
    num_draws = 6000
    counts = Counter(int(sampler.draw(logits, [0])) for _ in range(num_draws))
    for token, p in enumerate(expected):
        assert abs(counts[token] / num_draws - p) < 4.5 * math.sqrt(p * (1 - p) / num_draws)


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = RowSampler(1.3, 1.0, [7, 8, 9, 10]).draw(logits[[2, 0]], [2, 0]).tolist()
    for place, (row, seed) in enumerate(((2, 9), (0, 7))):
        u = float(torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        cumulative = itertools.accumulate(torch.softmax(logits[row] / 1.3, 0).tolist())
        token = next(i for i, total in enumerate(cumulative) if u < total)
        assert found[place] == token


@pytest.mark.parametrize("num_tried", [2, 7, 256])
def test_nucleus_by_sorting(num_tried: int) -> None:
    probabilities = torch.softmax(2 * torch.randn((20, 60), generator=torch.Generator().manual_seed(1)), -1)
    for top_p in (0.05, 0.5, 0.9, 0.999):
        found = nucleus(probabilities, top_p, num_tried)
        for row, kept in zip(probabilities.tolist(), found.tolist(), strict=True):
            order = sorted(range(60), key=lambda i: -row[i])
            count = next(n for n in range(1, 61) if sum(row[i] for i in order[:n]) >= top_p)
            assert {i for i in range(60) if kept[i] > 0} == set(order[:count])
    flat = torch.full((1, 8), 0.125)
    assert torch.equal(nucleus(flat, 0.3), flat)  # equals are not told apart
    assert torch.equal(nucleus(torch.full((1, 8), 0.12), 0.99), torch.full((1, 8), 0.12))
