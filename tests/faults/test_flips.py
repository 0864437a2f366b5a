"""Promise 3: damage anywhere in a finished project is found or harmless, and a run makes it good."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.base.errors import DamageFound, EyasError
from eyas.base.files import set_aside
from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.pipeline.mend import mend, set_damages_aside
from eyas.pipeline.order import STAGES
from eyas.pipeline.run import plan
from eyas.stages.project import Project
from eyas.stages.protocol import verify
from eyas.store.repair import open_or_rebuild
from tests.faults.forked import error_of, run_child
from tests.faults.small import LONG, PARTS, SEED, rng_of
from tests.projects import outcome

NUM_FAULTS = 100 if LONG else 60  # in each part

KINDS = {
    "segment": "store/segments/seg-*",
    "store recipe": "store/store.json",
    "ledger": "state/ledger.db",
    "caches and notes": "state/*.json",
    "samples": "data/samples/*",
    "prompts": "data/prompts/**/*",
    "answers": "data/answers/*",
    "statistics": "data/stats.json",
    "vocabulary": "drafter/vocabulary/*",
    "checkpoint": "drafter/checkpoints/step-*/*",
    "metrics": "drafter/metrics.jsonl",
    "report": "reports/*",
    "export": "exports/*/*",
    "configuration": "eyas.toml",
    "log": "logs/attempt-*/events.jsonl",
}
NEVER_READ_AGAIN = ("statistics", "metrics", "log", "caches and notes")
"""Shown to people or remembered to save time: nothing is computed from them."""


def flip(path: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, other: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def punch(path: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(data) - 4096)) // 4096 * 4096
    end = min(len(data), start + 4096)
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def replace(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(1, 5000)))


def swap(path: Path, other: Path, rng: random.Random) -> None:
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def remove(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()


def add_foreign(path: Path, other: Path, rng: random.Random) -> None:
    (path.parent / "foreign.bin").write_bytes(rng.randbytes(50))


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    flip, flip, flip, truncate, punch, replace, swap, remove, add_foreign,
)  # fmt: skip


def files_of(root: Path, kind: str) -> list[Path]:
    return sorted(p for p in root.glob(KINDS[kind]) if p.is_file() and p.stat().st_size)


def findings(root: Path) -> list[str]:
    """What a person or a run would be told: the deep check of every stage, and the plan."""
    found: list[str] = []
    try:
        project = Project.open(root)
        for stage in STAGES:
            found += verify(stage, project)
        found += [f"{s.stage}: {s.action} {s.why}" for s in plan(project) if s.action != "skip"]
    except EyasError as error:
        found.append(str(error))
    return found


def set_all_aside(root: Path) -> None:
    """What `eyas verify` followed by a repair does: every damaged output out of the way, by name."""
    project, layout = Project.open(root), Layout(root)
    for stage in STAGES:
        for _ in range(3):
            ledger, _ = open_or_rebuild(layout)
            try:
                with ledger:
                    set_damages_aside(stage, project, ledger, deep=True)
                break
            except EyasError as error:
                if not isinstance(error, DamageFound) or not mend(project, STAGES, error, SilentProgress()):
                    raise


@pytest.mark.parametrize("part", PARTS)
def test_damage_is_found_and_made_good(
    part: int, finished: Path, expected: dict[str, Any], place: Path
) -> None:
    rng, harmless = rng_of(part), Counter[str]()
    num_faults = num_found = 0
    original = Path(shutil.copytree(finished, place / "original", symlinks=True))
    while num_faults < NUM_FAULTS:
        kind = list(KINDS)[num_faults % len(KINDS)]
        damage = DAMAGES[rng.randrange(len(DAMAGES))]
        root = place / "p"
        shutil.copytree(original, root, symlinks=True)
        path = rng.choice(files_of(root, kind))
        other = rng.choice([p for p in files_of(root, kind) if p != path] or [root / "prompts.jsonl"])
        before = {p: p.read_bytes() for p in (path, other)}
        damage(path, other, rng)
        told = f"seed {SEED}, part {part}, fault {num_faults}: {damage.__name__} of {path.relative_to(root)}"
        found = findings(root)
        num_faults += 1
        num_found += bool(found)
        if not found:
            harmless[kind] += 1
        if kind == "configuration" or root / "prompts.jsonl" in (other if damage is swap else path,):
            # a person's own files: a valid change is a wish, and a run follows it or asks
            for changed, content in before.items():
                changed.write_bytes(content)
        make_good(root, kind, found, told)
        assert outcome(root) == expected, told
        shutil.rmtree(root)
    print(f"seed {SEED}, part {part}: {num_faults} faults, {num_found} found, harmless: {dict(harmless)}")
    assert num_faults == NUM_FAULTS


def make_good(root: Path, kind: str, found: list[str], told: str) -> None:
    """Set aside what was found and run; nothing may be left to find."""
    if not found:
        return  # then the outcome has to be the same as it is
    newer = [line for line in found if "newer eyas" in line or "has format" in line]
    if newer:  # refused, for a person to look at: moved away by hand
        layout = Layout(root)
        path = layout.ledger if kind == "ledger" else layout.store_recipe
        set_aside(path, layout.set_aside, "says it is of a newer format")
    set_all_aside(root)
    code = run_child(root)
    assert code == 0, f"{told}: found {found}; exit code {code}: {error_of(root)}"
    left = findings(root)
    assert not left or kind in NEVER_READ_AGAIN, f"{told}: left {left}"
