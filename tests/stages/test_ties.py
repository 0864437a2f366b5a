"""Texts that part: a numeric tie is one, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from eyas.drafter.acceptance import AcceptanceCounts
from eyas.drafter.speculate import Decoded
from eyas.stages.evaluate.tally import DraftTally
from eyas.stages.evaluate.ties import parting
from eyas.stages.evaluate.work import _doubt, _equal_texts

PROMPT = [7, 8]


@dataclass
class Stub:
    """A target whose logits are told: the same at every place, noted for which tokens they were asked."""

    logits_told: list[float]
    dtype: torch.dtype = torch.bfloat16
    asked: tuple[int, ...] = ()

    def padded(self, rows: list[list[int]]) -> torch.Tensor:
        self.asked = tuple(rows[0])
        return torch.tensor(rows)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, 4, dtype=self.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.logits_told] * len(states), dtype=self.dtype)


@pytest.mark.parametrize(
    ("dtype", "largest", "gap", "tied"),
    [
        # two bfloat16 numbers beside each other at 40 are 0.25 apart
        (torch.bfloat16, 40.0, 0.0, True),
        (torch.bfloat16, 40.0, 0.25, True),
        (torch.bfloat16, 40.0, 0.5, False),
        (torch.bfloat16, 8.0, 0.25, True),
        (torch.bfloat16, 8.0, 0.5, False),
        (torch.float32, 40.0, 0.001, True),
        (torch.float32, 40.0, 0.01, False),
        (torch.float64, 40.0, 0.0, True),
        (torch.float64, 40.0, 1e-6, False),
    ],
)
def test_a_tie_is_judged_by_the_arithmetic(
    dtype: torch.dtype, largest: float, gap: float, tied: bool
) -> None:
    target = Stub([largest, largest - gap, -3.0], dtype)
    found = parting(target, PROMPT, [5, 6, 0, 9], [5, 6, 1, 4])
    assert found is not None
    assert target.asked == (7, 8, 5, 6), "what both share, and no more"
    assert found.gap == pytest.approx(gap, abs=1e-4)
    assert found.tied is tied


def test_a_token_that_neither_is_near_is_no_tie() -> None:
    """What an engine would write whose drafts are taken without being right."""
    found = parting(Stub([20.0, 19.9, 3.0]), PROMPT, [0, 0], [0, 2])
    assert found is not None
    assert not found.tied


def decoded(tokens: list[int]) -> Decoded:
    return Decoded(tokens, "stop", AcceptanceCounts.empty(1))


def test_a_text_that_goes_on_where_the_other_ended_is_no_tie() -> None:
    tally = DraftTally(1)
    target = Stub([0.0] * 9)
    tally.add(target, "a", "d", PROMPT, decoded([3, 4]), decoded([3, 4, 5]))
    (told,) = tally.different
    assert (told["conversation"], told["logit_gap"]) == ("a", None)
    assert target.asked == ()
    json.dumps(tally.different, allow_nan=False)


def test_equal_tied_and_different_texts_are_counted_apart() -> None:
    tally = DraftTally(1)
    target = Stub([16.0, 15.875, 15.75, 2.0])
    for name, plain, drafted in (
        ("same", [3, 3], [3, 3]),
        ("tie", [0, 1], [1, 1]),
        ("wider tie", [3, 0], [3, 2]),
        ("fault", [0, 0], [0, 3]),
    ):
        tally.add(target, name, "d", PROMPT, decoded(plain), decoded(drafted))
    assert _equal_texts(tally) == "1 of 4, 2 at a numeric tie, 1 different"
    assert _doubt(DraftTally(3, equal=2, ties=1), "bfloat16") == ""
    narrow, wide = _doubt(tally, "bfloat16"), _doubt(tally, "float32")
    assert narrow.startswith("1 of 4 texts differ")
    assert wide.startswith("1 of 4 texts differ")
    assert "eyas evaluate --redo --set target.dtype=float32" in narrow
    assert "report it" in wide
    assert "--set" not in wide
    told = tally.as_dict({"d": 4})["lossless"]
    assert (told["num_prompts"], told["equal"], told["ties"], told["different"]) == (4, 1, 2, 1)
    assert told["largest_tie"] == 0.25
    assert [one["conversation"] for one in told["differences"]] == ["fault"]
    assert told["differences"][0]["logit_gap"] == 14.0
