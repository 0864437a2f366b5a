"""Contestants taking turns: one step each, again and again, so that a busy moment hits all alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.training.case import Case

REPOSITORY = Path(__file__).resolve().parents[2]
WARM_UP = 2
"""Steps before counting: what compiles does it then."""


@dataclass
class Measured:
    """What a contestant did.

    Attributes:
        cpu, wall: seconds of each counted step.
        sums: of each step, warm-up included, the sum of row losses at each draft step.
        peak, imported: bytes of the process: most, and after its imports.
    """

    version: str
    shifted: bool
    objective: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    sums: list[list[float]] = field(default_factory=list)
    peak: int = 0
    imported: int = 0


class Child:
    """A contestant's process."""

    def __init__(
        self, name: str, words: list[str], threads: int, *, module: str = "benchmarks.training.child"
    ) -> None:
        paths = [str(REPOSITORY / "src"), str(REPOSITORY)]
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, name, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if name in ("SpecForge", "speculators") else None,
            text=True,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "PYTHONWARNINGS": "ignore",
            },
        )

    def answer(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            ChildFailed: it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            errors = self._process.stderr.read() if self._process.stderr else ""
            raise ChildFailed(f"{self.name}: {(errors.strip().splitlines() or ['ended'])[-1]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, line: str = "") -> None:
        """Send a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildFailed(f"{self.name}: ended") from error

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line, get one."""
        self.tell(line)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class ChildFailed(Exception):
    """A contestant's process ended before it answered."""


def reference(case: Case) -> dict[str, dict[str, list[float]]]:
    """`benchmarks.training.plain.reference_sums`, made in a process that goes away again."""
    child = Child("reference", [case.to_json()], 1)
    try:
        found: dict[str, dict[str, list[float]]] = child.answer()
    finally:
        child.close()
    return found


def take_turns(
    names: list[str], case: Case, threads: int, rounds: int
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Run all; those that could not run are in the second result, with the reason."""
    children, measured, failed = [], dict[str, Measured](), dict[str, str]()
    for name in names:
        child = Child(name, [case.to_json()], threads)
        try:
            said = child.answer()
            measured[name] = Measured(**said)
            for _ in range(WARM_UP):
                measured[name].sums.append(child.ask()["sums"])
            children.append(child)
        except ChildFailed as error:
            measured.pop(name, None)
            failed[name] = str(error)
            child.close()
    for turn in range(rounds):
        for child in children:
            answer = child.ask()
            of = measured[child.name]
            of.cpu.append(answer["cpu"])
            of.wall.append(answer["wall"])
            of.sums.append(answer["sums"])
            of.peak, of.imported = answer["peak"], answer["imported"]
        seconds = ", ".join(f"{child.name} {measured[child.name].cpu[-1]:.2f}" for child in children)
        print(f"{threads} thread(s), round {turn + 1} of {rounds}: CPU seconds {seconds}", file=sys.stderr)
    for child in children:
        child.close()
    return measured, failed
