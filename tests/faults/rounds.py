"""The same fault again and again in runs of a project, until they end; faults are counted, never guessed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eyas.base.errors import DiskFull
from tests.faults.forked import KILLED, error_of, kill_at_call, run_child
from tests.faults.small import remount, tmpfs

Make = Callable[[Path], Path]
"""Makes a project in a folder."""
Check = Callable[[Path, str], None]
"""Looks at a project that came to its end; the text says what happened to it."""


def nothing(root: Path) -> None:
    """Looks at nothing between two runs."""


def kills_at_random(
    place: Path,
    wanted: int,
    patience: Callable[[int], float],
    make: Make,
    check: Check,
    between: Callable[[Path], None] = nothing,
) -> tuple[int, int]:
    """Kill runs until there were ``wanted`` kills and the last project came to its end; kills and projects.

    Args:
        patience: seconds after which the next run is killed, by the kills so far.
        between: called after each run.
    """
    kills = projects = 0
    while kills < wanted:
        root = make(place / f"p{projects}")
        projects += 1
        while True:
            code = run_child(root, kill_after_seconds=patience(kills))
            between(root)
            if code == 0:
                break
            assert code == KILLED, error_of(root)
            kills += 1
        check(root, f"after {kills} kills")
        shutil.rmtree(root)
    return kills, projects


def kills_at_calls(
    place: Path,
    names: Sequence[str],
    numbers: Iterable[int],
    make: Make,
    check: Check,
    between: Callable[[Path], None] = nothing,
) -> int:
    """Kill the run of a new project at the n-th call of these functions, until no n is left; the kills."""
    kills = misses = 0
    for number in numbers:
        if misses == 2:
            break
        root = make(place / f"p{number}")
        code = run_child(root, prepare=kill_at_call(names, number))
        if code == 0:
            misses += 1
        else:
            assert code == KILLED, error_of(root)
            kills += 1
            between(root)
            assert run_child(root) == 0, error_of(root)
        check(root, f"killed at call {number}")
        shutil.rmtree(root)
    return kills


def fillings(place: Path, sizes: Iterable[int], make: Make, check: Check) -> int:
    """Run a project on a disk of each size in KiB until it fits; how often the disk was full."""
    full = 0
    with tmpfs(place / "disk", "size=64k") as disk:
        root = make(disk / "p")
        for size in sizes:
            remount(disk, f"size={size}k")
            code = run_child(root, overrides=("disk.when_full=stop",))
            if code == 0:
                break
            assert code == DiskFull.exit_code, f"{size} KiB: {code} {error_of(root)}"
            full += 1
        assert run_child(root) == 0, error_of(root)
        check(root, f"full {full} times")
    return full
