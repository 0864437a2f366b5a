"""Copies of a mounted filesystem at random instants: every acknowledged sample is whole in each."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.base.layout import Layout
from eyas.store import scrub
from eyas.store.ledger import Ledger
from tests.faults.acknowledged import acknowledged, acknowledging
from tests.faults.forked import error_of, run_child, run_here
from tests.faults.small import LONG, PARTS, SEED, command, mounted, rng_of, small_project
from tests.projects import outcome

NUM_CUTS = 10 if LONG else 5  # in each part


def cut(root: Path, image: Path, place: Path, number: int, seconds: float) -> tuple[Path, set[str]]:
    """Run a project for some seconds, then copy its disk as it is; the copy and what was acknowledged."""
    acks, copy = place / f"acks{number}", place / f"cut{number}.img"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            acknowledging(acks)()
            code = run_here(root)
        finally:
            os._exit(code)
    time.sleep(seconds)
    os.kill(child, signal.SIGSTOP)
    told = acknowledged(acks)
    command("cp", "--sparse=always", image, copy)
    os.kill(child, signal.SIGKILL)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    return copy, told


@pytest.mark.parametrize("part", PARTS)
def test_what_was_acknowledged_survives(
    part: int, model: Path, expected: dict[str, Any], place: Path
) -> None:
    rng, cuts, samples = rng_of(part), 0, 0
    image = place / "e.img"
    command("truncate", "-s", "64M", image)
    command("mkfs.ext4", "-q", "-F", image)
    with mounted(place / "disk", "-o", "loop", image) as disk:
        while cuts < NUM_CUTS:
            root = small_project(disk / f"p{cuts}", model)
            command("sync", "-f", root)  # what a person gave is on the disk
            # the longer lives reach the later stages
            copy, told = cut(root, image, place, cuts, rng.uniform(0.2, 6.0))
            with mounted(place / f"copy{cuts}", "-o", "loop", copy) as mount:
                check(mount / root.name, told, expected, cuts)
            cuts += 1
            samples += len(told)
            copy.unlink()
            shutil.rmtree(root)
    print(f"seed {SEED}, part {part}: {cuts} power cuts, {samples} acknowledged samples")
    assert cuts == NUM_CUTS


def check(root: Path, told: set[str], expected: dict[str, Any], number: int) -> None:
    """The copy holds every acknowledged sample whole, and goes on to the expected end."""
    layout = Layout(root)
    if not layout.config.exists():
        assert not told  # the power went before the project itself was on the disk
        return
    if told:
        with Ledger.open(layout.ledger, create=False) as ledger:
            stored = {name for name, _ in ledger.stored()}
            damage = [fault for fault in scrub.deep(layout, ledger) if fault.is_damage]
        assert told <= stored, f"seed {SEED}, cut {number}"
        assert not damage, f"seed {SEED}, cut {number}: {damage}"
    assert run_child(root) == 0, error_of(root)
    assert outcome(root) == expected, f"seed {SEED}, cut {number}"
