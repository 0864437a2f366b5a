"""Who writes to the project, and does it get on?"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from eyas.base.units import format_seconds
from eyas.hosts.processes import UNINTERRUPTIBLE, waits_on
from eyas.pipeline.lock import Holder
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class WriterFacts:
    """The lock's holder; seconds since its last event and since the ledger's last change."""

    holder: Holder | None
    host: str
    state: str
    waits_on: str
    silent_seconds: float | None
    ledger_seconds: float | None


def look(scene: Scene) -> WriterFacts:
    holder, state, on = scene.holder, "", ""
    if holder is not None and holder.pid in scene.processes:
        state = scene.processes[holder.pid].state
        on = waits_on(scene.host, holder.pid) if state == UNINTERRUPTIBLE else ""
    return WriterFacts(
        holder, socket.gethostname(), state, on, _age(scene, scene.layout.logs / "latest" / "events.jsonl"),
        _age(scene, scene.layout.ledger, scene.layout.ledger.with_name("ledger.db-wal")),
    )  # fmt: skip


def _age(scene: Scene, *paths: object) -> float | None:
    """Seconds since the newest of these files changed."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(os.stat(str(path)).st_mtime)
    return scene.now() - max(times) if times else None


def judge(scene: Scene, facts: WriterFacts) -> Line:
    holder = facts.holder
    if holder is None:
        return Line("writer", "ok", "nobody writes to the project")
    said = f"eyas {holder.verb}, process {holder.pid} on {holder.host}, since {holder.since}"
    silent = facts.silent_seconds
    evidence = [said]
    evidence += [] if silent is None else [f"last event {format_seconds(silent)} ago"]
    if facts.ledger_seconds is not None:
        evidence.append(f"ledger changed {format_seconds(facts.ledger_seconds)} ago")
    if facts.waits_on:
        evidence.append(f"in uninterruptible sleep: {facts.waits_on}")
    if holder.host != facts.host:
        return Line("writer", "unknown", f"{said}: on another machine, not looked at", tuple(evidence))
    limit = 60 * scene.project.config.recovery.silent_minutes
    quiet = [age for age in (silent, facts.ledger_seconds) if age is not None]
    findings = []
    if quiet and min(quiet) > limit:
        stuck = f", stuck on {facts.waits_on}" if facts.waits_on else ""
        findings.append(
            Finding(
                "writer-silent",
                f"process {holder.pid}",
                "failed",
                f"eyas {holder.verb} (process {holder.pid}) was silent {format_seconds(min(quiet))}{stuck}",
                tuple(evidence),
                mend="eyas stop, then: eyas recover",
                detail={"pid": holder.pid, "started_ticks": holder.started_ticks},
            )
        )
    return verdict("writer", findings, said, evidence)


CHECK = Check("writer", look, judge)
