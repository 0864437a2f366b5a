"""Memory and shared memory of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.units import format_bytes
from eyas.hosts.disks import Filesystem
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene

LOW_SHARE = 0.05
"""A smaller share of memory than this is little."""
SHARED_FULL_SHARE = 0.9
"""Shared memory used beyond this cannot take dumps any more."""
SHARED = "/dev/shm"


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of memory, and the filesystem of shared memory (None: there is none)."""

    total_bytes: int
    available_bytes: int
    shared: Filesystem | None


def look(scene: Scene) -> MemoryFacts:
    fields = dict(
        line.split(":", 1) for line in scene.host.read_text("/proc/meminfo").splitlines() if ":" in line
    )
    kibibytes = {name: int(text.split()[0]) for name, text in fields.items() if text.split()}
    shared = scene.filesystem(SHARED)
    return MemoryFacts(
        kibibytes.get("MemTotal", 0) << 10,
        kibibytes.get("MemAvailable", 0) << 10,
        shared if shared is not None and shared.point == SHARED else None,
    )


def judge(scene: Scene, facts: MemoryFacts) -> Line:
    if facts.total_bytes == 0:
        return Line("memory", "unknown", "the machine does not say how much memory it has")
    available, total = format_bytes(facts.available_bytes), format_bytes(facts.total_bytes)
    evidence, findings = [f"{available} of {total} available"], []
    if facts.available_bytes < LOW_SHARE * facts.total_bytes:
        findings.append(
            Finding(
                "memory-low",
                "memory",
                "warn",
                f"{available} of {total} memory is left",
                tuple(evidence),
                mend="end what takes it (ps aux --sort=-rss), then: eyas recover",
            )
        )
    shared = facts.shared
    said = "no shared memory"
    if shared is not None:
        used = shared.total_bytes - shared.free_bytes
        said = f"shared memory {format_bytes(shared.free_bytes)} of {format_bytes(shared.total_bytes)} free"
        evidence.append(said)
        if shared.total_bytes and used > SHARED_FULL_SHARE * shared.total_bytes:
            findings.append(
                Finding(
                    "shared-memory-full",
                    SHARED,
                    "warn",
                    f"shared memory is full: {said}",
                    (f"{format_bytes(used)} used at {SHARED}",),
                    mend=f"look at {SHARED}: eyas recover sets dumps of its own dead servers aside",
                )
            )
    return verdict("memory", findings, f"{available} of {total} free; {said}", evidence)


CHECK = Check("memory", look, judge, of_machine=True)
