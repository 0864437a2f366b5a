from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.rows import last_state_rows, supervised_rows
from tests.drafter.naive import is_supervised


@pytest.mark.parametrize(
    ("spans", "length", "step", "expected"),
    [
        # tokens 3, 4, 5, 6 are the answer: row 2 knows x[3] and drafts x[4]; row 4 drafts the last, x[6]
        (((3, 7),), 9, 0, [2, 3, 4]),
        (((3, 7),), 9, 1, [2, 3]),
        (((3, 7),), 9, 2, [2]),
        (((3, 7),), 9, 3, []),
        # an answer at the very start: there is no row before it
        (((0, 3),), 5, 0, [0]),
        (((0, 4),), 5, 1, [0]),
        # an answer that starts at token 1 is drafted from row 0
        (((1, 3),), 5, 0, [0]),
        # at the very end
        (((2, 5),), 5, 0, [1, 2]),
        (((2, 5),), 5, 2, []),
        # one token is given by the target itself: nothing to draft
        (((2, 3),), 5, 0, []),
        (((2, 2),), 5, 0, []),
        # touching answers stay two
        (((2, 4), (4, 7)), 8, 0, [1, 3, 4]),
        (((2, 4), (4, 7)), 8, 1, [3]),
        # overlapping and repeated ones count once
        (((2, 5), (3, 7), (2, 5)), 8, 0, [1, 2, 3, 4]),
        (((2, 5), (3, 7)), 8, 1, [1, 2, 3]),
        # a span that is longer than its sample
        (((3, 99),), 6, 0, [2, 3]),
    ],
)
def test_by_hand(spans, length, step, expected):
    assert supervised_rows(spans, length, step).tolist() == expected


SPANS = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 16)), max_size=4)


@given(SPANS, st.integers(0, 14), st.integers(0, 4))
def test_equals_the_definition(spans, length, step):
    expected = [row for row in range(length) if is_supervised(spans, length, row, step)]
    assert supervised_rows(spans, length, step).tolist() == expected


@given(SPANS, st.integers(0, 14))
def test_last_states_are_those_whose_next_token_is_supervised(spans, length):
    expected = [
        row for row in range(length) if any(start <= row + 1 < min(end, length) for start, end in spans)
    ]
    assert last_state_rows(spans, length).tolist() == expected


@given(SPANS, st.integers(0, 14), st.integers(0, 4))
def test_teacher_rows_are_kept_and_lie_at_place_plus_step(spans, length, step):
    first = supervised_rows(spans, length, 0)
    rows = supervised_rows(spans, length, step)
    assert set(rows + 1 + step) <= set(last_state_rows(spans, length))
    places = np.searchsorted(first, rows)
    assert (first[places + step] == rows + step).all()
