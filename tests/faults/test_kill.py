"""Promise 1: killed at any instant, any number of times, the end is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import KILLED, kill_at_call, run_child, run_here
from tests.faults.small import LONG, PARTS, SEED, numbers_of, rng_of
from tests.projects import make_project, outcome, tiny_target

NUM_KILLS = 50  # in each part: 1,000 in the long form
COMMIT_CALLS = ("fsync", "rename", "replace")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def unbroken(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = make_project(tmp_path_factory.mktemp("unbroken") / "p", target)
    assert run_here(root) == 0
    found = outcome(root)
    assert len(found["store"]) >= 10
    return found


def test_two_unbroken_runs_are_equal(target: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    assert run_child(root) == 0
    assert outcome(root) == unbroken


@pytest.mark.parametrize("part", PARTS)
def test_killed_at_random_instants(part: int, target: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    rng = rng_of(part)
    kills = rounds = 0
    while kills < NUM_KILLS:
        root = make_project(tmp_path / f"p{rounds}", target)
        rounds += 1
        while True:
            # short lives first, so that every stage is hit; they grow, so that the run ends
            patience = rng.uniform(0.0, 0.15) * (1 + kills % 25)
            code = run_child(root, kill_after_seconds=patience)
            if code == 0:
                break
            assert code == KILLED, (root / "last-error.txt").read_text()
            kills += 1
        assert outcome(root) == unbroken, f"seed {SEED}, part {part}, after {kills} kills"
        shutil.rmtree(root)
    print(f"seed {SEED}, part {part}: {kills} kills in {rounds} runs")
    assert kills >= NUM_KILLS


@pytest.mark.parametrize("part", PARTS)
def test_killed_at_every_commit_call(
    part: int, target: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    """Before or after the n-th fsync, rename or replace of a run, n = 1, 2, ... until none is left."""
    kills = misses = 0
    for number in numbers_of(part, short_stride=5):
        if misses == 2:
            break
        root = make_project(tmp_path / f"p{number}", target)
        code = run_child(root, prepare=kill_at_call(COMMIT_CALLS, number))
        if code == 0:
            misses += 1
        else:
            assert code == KILLED
            kills += 1
            assert run_child(root) == 0, (root / "last-error.txt").read_text()
        assert outcome(root) == unbroken, f"killed at call {number}"
        shutil.rmtree(root)
    print(f"part {part}: {kills} kills at commit calls")
    assert kills >= (2 if LONG else 8)
