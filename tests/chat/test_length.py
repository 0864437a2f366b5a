"""The length policy, enumerated by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from eyas.chat.length import Fitted, fit, has_drafts
from eyas.chat.render import RenderedSample

Policy = Literal["truncate", "drop"]


def sample(length: int, *spans: tuple[int, int]) -> RenderedSample:
    return RenderedSample(list(range(length)), spans, "stop")


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_a_sample_within_the_limit_is_left_alone(policy: Policy):
    given = sample(10, (4, 10))
    assert fit(given, 10, policy) == Fitted(given)


def test_truncation_cuts_tokens_and_clips_spans():
    fitted = fit(sample(12, (2, 5), (7, 10), (10, 12)), 9, "truncate")
    assert fitted.sample == RenderedSample(list(range(9)), ((2, 5), (7, 9)), "length")
    assert fitted.truncated


def test_truncation_behind_the_last_answer_does_not_cut_it():
    assert fit(sample(12, (2, 5)), 9, "truncate").sample == RenderedSample(list(range(9)), ((2, 5),), "stop")


@pytest.mark.parametrize("policy", ["truncate", "drop"])
@pytest.mark.parametrize("limit", [1, 4, 5])
def test_a_prompt_that_leaves_no_draft_is_too_long(policy: Policy, limit: int):
    fitted = fit(sample(10, (4, 10)), limit, policy)
    assert (fitted.sample, fitted.reason) == (None, "prompt too long")


def test_one_draft_is_enough():
    assert fit(sample(10, (4, 10)), 6, "truncate").sample == RenderedSample(
        list(range(6)), ((4, 6),), "length"
    )


def test_drop_drops():
    fitted = fit(sample(10, (4, 10)), 9, "drop")
    assert (fitted.sample, fitted.reason) == (None, "too long")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [((), False), (((0, 2),), False), (((0, 3),), True), (((3, 4),), False), (((3, 5),), True),
     (((1, 2), (3, 4), (5, 6)), False), (((1, 2), (3, 5)), True)],
)  # fmt: skip
def test_a_draft_needs_two_tokens_of_one_span_after_the_first_token(
    spans: tuple[tuple[int, int], ...], expected: bool
):
    assert has_drafts(spans) is expected
    by_definition = any(  # DESIGN 8, step 0: x[t+1] and x[t+2] lie in one span, for a row t >= 0
        start <= t + 1 and t + 2 < end for start, end in spans for t in range(10)
    )
    assert by_definition is expected
    if not expected:
        assert fit(sample(10, *spans), 10, "truncate").reason == "nothing to draft"
