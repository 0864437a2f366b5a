"""Promise 1 with a bound on the store: killed anywhere, the waves come to the same weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from eyas.base.layout import Layout
from tests.faults.forked import error_of, run_child, start_child
from tests.faults.rounds import fillings, kills_at_calls, kills_at_random
from tests.faults.small import LONG, PARTS, SEED, numbers_of, rng_of
from tests.projects import outcome, store_content, weights_digest
from tests.waves import (
    BOUND,
    bounded_project,
    ids_of,
    noting_batches,
    run_into_the_waves,
    states_of,
    store_bytes,
    trained_counts,
    waves_of,
)

NUM_KILLS = 15  # in each part: 300 in the long form
RELEASE_CALLS = ("fsync", "rename", "replace", "unlink")


@pytest.fixture(scope="module")
def waves(model: Path, memory: Path) -> Path:
    """A bounded project that ran through unbroken."""
    root = bounded_project(memory / "waves", model)
    assert run_child(root, prepare=noting_batches(memory / "waves.batches")) == 0, error_of(root)
    return root


@pytest.fixture(scope="module")
def unbroken(waves: Path) -> dict[str, Any]:
    found = outcome(waves)
    assert waves_of(waves)["waves"] >= 3
    return found


def require_end(root: Path, unbroken: dict[str, Any], hint: str) -> None:
    """The same weights, and every sample accounted for."""
    assert weights_digest(root) == unbroken["weights"], hint
    assert outcome(root) == unbroken, hint
    kept, trained = ids_of(root, "validation"), ids_of(root, "train")
    assert states_of(root) == {"stored": len(kept), "released": len(trained)}, hint
    assert set(store_content(root)) == kept, hint
    assert {path.name for path in (root / "store" / "segments").iterdir()} == set(segments_of(root)), hint


def segments_of(root: Path) -> list[str]:
    from eyas.store.ledger import Ledger

    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        return [segment.name for segment in ledger.segments()]


def test_an_unbroken_run_stays_below_its_bound(model: Path, place: Path) -> None:
    """Sizes are those of the files, looked at from outside, hundreds of times."""
    root = bounded_project(place / "p", model)
    child, most, looks = start_child(root), 0, 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        most, looks = max(most, store_bytes(root)), looks + 1
    print(f"{looks} looks: at most {most} of {BOUND} bytes")
    assert looks > 200
    assert BOUND / 2 < most <= BOUND


def test_every_sample_is_trained_as_often_as_stated(waves: Path, memory: Path) -> None:
    counts = trained_counts(memory / "waves.batches")
    assert set(counts) == ids_of(waves, "train")
    assert set(counts.values()) == {2}


def test_two_unbroken_runs_are_equal(model: Path, unbroken: dict[str, Any], place: Path) -> None:
    root = bounded_project(place / "p", model)
    assert run_child(root) == 0, error_of(root)
    require_end(root, unbroken, "unbroken")


def stays_below(root: Path) -> None:
    assert store_bytes(root) <= BOUND


@pytest.mark.parametrize("part", PARTS)
def test_killed_at_random_instants(part: int, model: Path, unbroken: dict[str, Any], place: Path) -> None:
    rng = rng_of(part)

    def patience(kills: int) -> float:
        return rng.uniform(0.0, 0.25) * (1 + kills % 20) * (1 + kills // 20)

    def check(root: Path, what: str) -> None:
        require_end(root, unbroken, f"seed {SEED}, part {part}, {what}")

    kills, projects = kills_at_random(
        place, NUM_KILLS, patience, lambda p: bounded_project(p, model), check, stays_below
    )
    print(f"seed {SEED}, part {part}: {kills} kills in {projects} runs")
    assert kills >= NUM_KILLS


@pytest.mark.parametrize("part", PARTS)
def test_killed_at_every_commit_call(part: int, model: Path, unbroken: dict[str, Any], place: Path) -> None:
    """Before or after the n-th fsync, rename, replace or unlink, n = 1, 2, ... until none is left."""

    def check(root: Path, what: str) -> None:
        require_end(root, unbroken, what)

    numbers = numbers_of(part, short_stride=31)
    kills = kills_at_calls(
        place, RELEASE_CALLS, numbers, lambda p: bounded_project(p, model), check, stays_below
    )
    print(f"part {part}: {kills} kills at commit calls")
    assert kills >= (2 if LONG else 5)


@pytest.mark.parametrize("lost", ["ledger", "ledger and waves.json"])
def test_a_lost_ledger_is_rebuilt_to_where_training_stood(
    lost: str, model: Path, unbroken: dict[str, Any], place: Path
) -> None:
    """In the middle of the waves; what was released is not captured again."""
    rng = rng_of(0)
    for number in range(3):
        root = bounded_project(place / f"p{number}", model)
        run_into_the_waves(root, lambda root=root: bool(states_of_or_none(root).get("released")))
        run_child(root, kill_after_seconds=rng.uniform(0.5, 2.0))
        before = states_of(root)
        for path in (root / "state").glob("ledger.db*"):
            path.unlink()
        if "waves" in lost:
            (root / "store" / "waves.json").unlink()
        batches = place / f"batches{number}"
        assert run_child(root, prepare=noting_batches(batches)) == 0, error_of(root)
        require_end(root, unbroken, f"{lost} lost with {before}")


def states_of_or_none(root: Path) -> dict[str, int]:
    return states_of(root) if Layout(root).ledger.exists() else {}


def test_a_disk_that_is_full_again_and_again(model: Path, unbroken: dict[str, Any], place: Path) -> None:
    """The bound is larger than the disk: it stops and goes on, and comes to the same."""

    def check(root: Path, what: str) -> None:
        require_end(root, unbroken, what)

    sizes = range(300, 9000, 120 if LONG else 300)
    full = fillings(place, sizes, lambda folder: bounded_project(folder, model), check)
    print(f"the disk was full {full} times")
    assert full >= 3
