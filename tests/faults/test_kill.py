"""Promise 1: killed at any instant, any number of times, the end is the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import KILLED, kill_at_call, run_child, run_here
from tests.faults.small import LONG, SEED
from tests.projects import make_project, outcome, tiny_target

NUM_KILLS = 1000 if LONG else 50
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


def test_killed_at_random_instants(target: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    rng = random.Random(SEED)
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
        assert outcome(root) == unbroken, f"seed {SEED}, after {kills} kills"
        shutil.rmtree(root)
    print(f"seed {SEED}: {kills} kills in {rounds} runs")
    assert kills >= NUM_KILLS


def test_killed_at_every_commit_call(target: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    """Before and after the n-th fsync, rename or replace of a run, n = 1, 2, ... until none is left.

    One project lives through all of them: each child goes on where the one before was killed.
    """
    kills, number, misses = 0, 1, 0
    stride = 1 if LONG else 5
    while misses < 2:
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
        number += stride
    print(f"{kills} kills at commit calls")
    assert kills >= (20 if LONG else 8)
