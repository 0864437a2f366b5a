"""Processes of this project that nobody waits for, and ones that are stuck in the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eyas.hosts.processes import UNINTERRUPTIBLE, ProcessInfo, waits_on
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene

_WORKING_VERBS = frozenset({"run", "prepare", "regenerate", "extract", "train", "evaluate", "export"})

_LEAVING_SECONDS = 60.0


@dataclass(frozen=True)
class ProcessFacts:
    """Left-over processes of this project, and stuck ones with what they wait on."""

    num_processes: int
    left: tuple[ProcessInfo, ...]
    stuck: tuple[tuple[ProcessInfo, str], ...]


def look(scene: Scene) -> ProcessFacts:
    own = scene.own_pids | _just_ended(scene)
    left = tuple(p for p in scene.processes.values() if p.pid not in own and _works_here(scene, p))
    ours = own | {p.pid for p in left}
    stuck = [p for p in scene.processes.values() if p.state == UNINTERRUPTIBLE and p.pid in ours]
    stuck = _still_stuck(scene, stuck) if stuck else []
    return ProcessFacts(len(scene.processes), left, tuple((p, waits_on(scene.host, p.pid)) for p in stuck))


def _works_here(scene: Scene, process: ProcessInfo) -> bool:
    """Whether it is an eyas that works on this project, by its command."""
    words = process.command
    is_eyas = "eyas" in words or any(Path(word).name == "eyas" for word in words[:2])
    if not is_eyas or not _WORKING_VERBS & set(words) or "--detach" in words:
        return False
    named = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--project"]
    return bool(named) and Path(named[-1]).is_absolute() and Path(named[-1]).resolve() == scene.layout.root


def _just_ended(scene: Scene) -> set[int]:
    """The process of an attempt that has ended moments ago: it only has to leave."""
    last = scene.last_attempt
    if last is None or last.outcome is None:
        return set()
    then = datetime.fromisoformat(last.last_event_at.replace("Z", "+00:00")).timestamp()
    pid = scene.events[0].get("pid")
    return {int(pid)} if pid is not None and scene.now() - then < _LEAVING_SECONDS else set()


def _still_stuck(scene: Scene, suspects: list[ProcessInfo]) -> list[ProcessInfo]:
    """Those that are in uninterruptible sleep at a second look: reading a disk is no fault."""
    import time

    time.sleep(0.3)
    found = []
    for process in suspects:
        try:
            text = scene.host.read_text(f"/proc/{process.pid}/stat")
        except OSError:
            continue
        if text.rpartition(")")[2].split()[0] == UNINTERRUPTIBLE:
            found.append(process)
    return found


def judge(scene: Scene, facts: ProcessFacts) -> Line:
    findings = [
        Finding(
            "process-left",
            f"process {p.pid}",
            "warn",
            f"process {p.pid} of this project runs although it does not hold the lock",
            (p.words,),
            detail={"pid": p.pid, "pgid": p.pgid, "age_seconds": p.age_seconds},
        )
        for p in facts.left
    ]
    findings += [
        Finding(
            "process-stuck",
            f"process {p.pid}",
            "failed",
            f"process {p.pid} is stuck in the kernel: {on}",
            (p.words, f"waits on {on}"),
            mend="no signal ends it: mend the storage that it waits for (dmesg), or start the machine again",
        )
        for p, on in facts.stuck
    ]
    return verdict("processes", findings, f"{facts.num_processes} processes, none of ours left over or stuck")


CHECK = Check("processes", look, judge)
