"""All checks in the order in which recovery needs their answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from eyas.recovery.checks import (
    boot,
    clock,
    dumps,
    files,
    gpus,
    hashed,
    ledger,
    memory,
    mounts,
    outputs,
    patches,
    places,
    processes,
    progress,
    recipe,
    servers,
    services,
    space,
    statistics,
    store,
    weights,
    writer,
)
from eyas.recovery.findings import STATES, Check, Finding, Line, State
from eyas.recovery.scene import Scene

CHECKS: tuple[Check[Any], ...] = (
    boot.CHECK,
    clock.CHECK,
    mounts.CHECK,
    space.CHECK,
    memory.CHECK,
    places.CHECK,
    files.CHECK,
    writer.CHECK,
    processes.CHECK,
    gpus.CHECK,
    services.CHECK,
    ledger.CHECK,
    outputs.CHECKS[0],
    statistics.CHECK,
    outputs.CHECKS[1],
    store.CHECK,
    hashed.CHECK,
    progress.CHECK,
    weights.CHECK,
    patches.CHECK,
    dumps.CHECK,
    servers.CHECK,
    recipe.CHECK,
    *outputs.CHECKS[2:],
)


@dataclass(frozen=True)
class Diagnosis:
    """One look: a line for each check."""

    lines: tuple[Line, ...]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        return [finding for line in self.lines for finding in line.findings]

    @property
    def worst(self) -> State:
        return max((line.state for line in self.lines), key=STATES.index)

    @property
    def exit_code(self) -> int:
        """0 when nothing is damaged or failed; else the code of the worst finding."""
        grave = [finding for finding in self.findings if finding.severity != "warn"]
        return max(grave, key=lambda finding: STATES.index(finding.severity)).exit_code if grave else 0

    def as_dict(self) -> dict[str, object]:
        """The diagnosis as ``--json`` prints it."""
        counts = {state: sum(line.state == state for line in self.lines) for state in STATES}
        return {
            "worst": self.worst,
            "counts": counts,
            "seconds": round(self.seconds, 3),
            "checks": [line.as_dict() for line in self.lines],
        }


def diagnose(scene: Scene, names: Iterable[str] | None = None) -> Diagnosis:
    """Run the checks (or only those named); changes nothing."""
    wanted = None if names is None else set(names)
    started, lines = time.monotonic(), []
    for check in CHECKS:
        if wanted is None or check.name in wanted:
            began = time.monotonic()
            lines.append(replace(check.run(scene), seconds=time.monotonic() - began))
    return Diagnosis(tuple(lines), time.monotonic() - started)


def check_of(finding: Finding, diagnosis: Diagnosis) -> str:
    """The check that found it."""
    return next(line.check for line in diagnosis.lines if finding in line.findings)
