"""Faults that only a person can mend: storage, stuck processes, other people's processes, changed recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.findings import Finding


@dataclass(frozen=True)
class ByHand:
    """Looks again whether a person has mended it; has no way of its own."""

    findings: tuple[Finding, ...]
    check: str

    def blocked(self, bench: Bench) -> str | None:
        return self.findings[0].mend

    def ways(self, bench: Bench) -> Sequence[Way]:
        return ()

    def proof(self, bench: Bench) -> Proof:
        left = bench.still([finding.key for finding in self.findings], [self.check])
        return Proof(not left, left[0].what if left else f"{self.check}: a new look finds it mended")
