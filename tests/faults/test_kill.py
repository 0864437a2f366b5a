"""Promise 1: killed at any instant, any number of times, the end is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import run_child, run_here
from tests.faults.rounds import kills_at_calls, kills_at_random
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

    def patience(kills: int) -> float:
        # short lives first, so that every stage is hit; they grow, so that the run ends
        return rng.uniform(0.0, 0.15) * (1 + kills % 25)

    def check(root: Path, what: str) -> None:
        assert outcome(root) == unbroken, f"seed {SEED}, part {part}, {what}"

    kills, projects = kills_at_random(tmp_path, NUM_KILLS, patience, lambda p: make_project(p, target), check)
    print(f"seed {SEED}, part {part}: {kills} kills in {projects} runs")
    assert kills >= NUM_KILLS


@pytest.mark.parametrize("part", PARTS)
def test_killed_at_every_commit_call(
    part: int, target: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    """Before or after the n-th fsync, rename or replace of a run, n = 1, 2, ... until none is left."""

    def check(root: Path, what: str) -> None:
        assert outcome(root) == unbroken, what

    numbers = numbers_of(part, short_stride=7)
    kills = kills_at_calls(tmp_path, COMMIT_CALLS, numbers, lambda p: make_project(p, target), check)
    print(f"part {part}: {kills} kills at commit calls")
    assert kills >= (2 if LONG else 8)
