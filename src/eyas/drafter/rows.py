"""Which rows of a sample are trained at which draft step.

Row t at step j reads tokens up to ``x[t+1+j]`` and predicts ``x[t+2+j]``. Serving asks for exactly
those drafts whose known tokens ``x[t+1..t+1+j]`` and predicted token all lie in one answer, so a row
counts where ``x[t+1]`` to ``x[t+2+j]`` lie in one span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Spans = Sequence[tuple[int, int]]


def supervised_rows(spans: Spans, length: int, step: int) -> npt.NDArray[np.int64]:
    """Rows that step ``step`` trains, ascending, each once.

    Args:
        spans: half-open token ranges; they may touch, overlap or repeat. Tokens beyond ``length``
            are ignored.
        length: tokens in the sample.
        step: draft step j, from 0.
    """
    trained = np.zeros(max(length, 0), dtype=bool)
    for start, end in spans:
        trained[max(start - 1, 0) : max(min(end, length) - 2 - step, 0)] = True
    return np.flatnonzero(trained)


def last_state_rows(spans: Spans, length: int) -> npt.NDArray[np.int64]:
    """Rows whose last state is kept: their next token is supervised."""
    kept = np.zeros(max(length, 0), dtype=bool)
    for start, end in spans:
        kept[max(start - 1, 0) : max(min(end, length) - 1, 0)] = True
    return np.flatnonzero(kept)
