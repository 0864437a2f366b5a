"""How long the work at hand will still take: a range, as wide as the rate was unsteady."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MIN_SECONDS = 20.0
"""Before that much of a phase was seen, nothing is said."""
_MIN_BEATS = 4
_WINDOWS = 8
_LEAST_SPREAD = 0.05


@dataclass(frozen=True)
class TimeLeft:
    """The range in which the work at hand should end; ``high_seconds`` is None when it hardly moves."""

    low_seconds: float
    high_seconds: float | None


def time_left(beats: Sequence[tuple[float, float]], total: float) -> TimeLeft | None:
    """The time that is left of one phase of work.

    The phase is cut into windows of equal time. The range is made of their mean rate, two standard errors
    of it to each side, and the rate of the last quarter, so that a rate that drifts is inside.

    Args:
        beats: (seconds, units done), both rising, from the phase's first beat on.
        total: units at its end.

    Returns:
        None while too little was seen, or when nothing is left.
    """
    if len(beats) < _MIN_BEATS:
        return None
    (start, _), (end, done) = beats[0], beats[-1]
    left = total - done
    if end - start < MIN_SECONDS or left <= 0:
        return None
    count = min(_WINDOWS, len(beats) - 1)
    width = (end - start) / count
    edges = [_done_at(beats, start + i * width) for i in range(count + 1)]
    rates = [(after - before) / width for before, after in pairwise(edges)]
    mean = statistics.fmean(rates)
    error = 2 * statistics.stdev(rates) / len(rates) ** 0.5
    quarter = max(1, len(rates) // 4)
    recent = statistics.fmean(rates[-quarter:])
    slow = min(mean - error, recent, mean * (1 - _LEAST_SPREAD))
    fast = max(mean + error, recent, mean * (1 + _LEAST_SPREAD))
    if fast <= 0:
        return None
    return TimeLeft(left / fast, left / slow if slow > mean / 20 else None)


def _done_at(beats: Sequence[tuple[float, float]], moment: float) -> float:
    """Units done at a moment, interpolated between beats."""
    for (t0, d0), (t1, d1) in pairwise(beats):
        if moment <= t1:
            return d0 + (d1 - d0) * (moment - t0) / (t1 - t0) if t1 > t0 else d1
    return beats[-1][1]
