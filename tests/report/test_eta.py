"""The range of the time that is left, against runs whose end is known."""

from __future__ import annotations

import random

from eyas.report.eta import time_left


def test_a_steady_rate_gives_a_narrow_range_around_the_truth() -> None:
    beats = [(5.0 * i, 50.0 * i) for i in range(20)]  # 10 a second
    left = time_left(beats, 2000)
    assert left is not None
    truth = (2000 - 950) / 10
    assert left.high_seconds is not None
    assert left.low_seconds < truth < left.high_seconds
    assert left.high_seconds - left.low_seconds < 0.15 * truth


def test_nothing_is_said_too_early_or_when_nothing_is_left() -> None:
    assert time_left([], 10) is None
    assert time_left([(0, 0), (1, 5), (2, 10), (3, 15)], 100) is None
    assert time_left([(10.0 * i, i) for i in range(10)], 9) is None


def test_a_rate_that_fell_by_half_is_inside_the_range() -> None:
    beats = [(5.0 * i, 100.0 * i) for i in range(10)]
    beats += [(beats[-1][0] + 5.0 * i, beats[-1][1] + 50.0 * i) for i in range(1, 11)]
    left = time_left(beats, 3000)
    assert left is not None
    assert left.high_seconds is not None
    assert left.high_seconds >= (3000 - beats[-1][1]) / 10  # at the newer rate


def test_work_that_stopped_moving_has_no_upper_end() -> None:
    beats = [(5.0 * i, min(i, 4) * 10.0) for i in range(40)]
    left = time_left(beats, 1000)
    assert left is not None
    assert left.high_seconds is None


def test_the_true_end_lies_inside_for_most_unsteady_runs() -> None:
    """Batches of very different size, simulated to their end: the range has to hold what happened."""
    seed, inside, count = 7, 0, 300
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(count):
        moment, done, beats = 0.0, 0.0, [(0.0, 0.0)]
        while done < 4000:
            moment += source.uniform(3, 9)
            done += source.expovariate(1 / 30)
            beats.append((moment, done))
        seen = len(beats) // 3
        left = time_left(beats[:seen], 4000)
        assert left is not None
        truth = beats[-1][0] - beats[seen - 1][0]
        inside += left.low_seconds <= truth <= (left.high_seconds or 1e9)
    assert inside > 0.75 * count, f"{inside} of {count}"
