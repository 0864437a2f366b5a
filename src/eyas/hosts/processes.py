"""Processes of a machine: who they are, whether they are stuck, and to what unit or container they belong."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass

import psutil

from eyas.hosts.host import Host

UNINTERRUPTIBLE = "D"
_STATES = {psutil.STATUS_DISK_SLEEP: "D", psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_STOPPED: "T"}
_CONTAINER = re.compile(
    r"(?:docker|libpod|crio|containerd|lxc)[-/.]?(?:payload\.)?([\w.-]+?)(?:\.scope)?(?:/|$)"
)
_FIELDS = "pid=,ppid=,pgid=,stat=,etimes=,args="


@dataclass(frozen=True)
class ProcessInfo:
    """One process; ``age_seconds`` tells it from a later one with the same number."""

    pid: int
    ppid: int
    pgid: int
    state: str
    age_seconds: float
    command: tuple[str, ...]

    @property
    def words(self) -> str:
        """The command for people, cut to a line."""
        text = " ".join(self.command)
        return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Owner:
    """To what a process belongs by its control group."""

    unit: str | None
    user_unit: bool
    container: str | None

    def __str__(self) -> str:
        parts = [self.unit or "", f"container {self.container}" if self.container else ""]
        return ", ".join(part for part in parts if part) or "no unit"


def list_processes(host: Host) -> list[ProcessInfo]:
    """All processes. Raises HostUnreachable; a machine without ``ps`` gives none."""
    if host.is_here:
        return _here()
    result = host.run(["ps", "-eo", _FIELDS])
    found = []
    for line in result.out.splitlines():
        parts = line.split(None, 5)
        if len(parts) < 6 or not parts[0].isdigit():
            continue
        try:
            command = tuple(shlex.split(parts[5]))
        except ValueError:
            command = tuple(parts[5].split())
        pid, ppid, pgid = int(parts[0]), int(parts[1]), int(parts[2])
        found.append(ProcessInfo(pid, ppid, pgid, parts[3][:1], float(parts[4]), command))
    return found


def _here() -> list[ProcessInfo]:
    import os
    import time

    now, found = time.time(), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError), process.oneshot():
            state = _STATES.get(process.status(), "S")
            age = max(0.0, now - process.create_time())
            command = tuple(process.cmdline()) or (process.name(),)
            found.append(
                ProcessInfo(process.pid, process.ppid(), os.getpgid(process.pid), state, age, command)
            )
    return found


def owner_of(host: Host, pid: int) -> Owner:
    """Unit and container of a process, from its control group."""
    try:
        text = host.read_text(f"/proc/{pid}/cgroup")
    except OSError:
        return Owner(None, False, None)
    path = text.strip().splitlines()[-1].partition("::")[2] if "::" in text else text
    units = [part for part in path.split("/") if part.endswith(".service")]
    # in a session of a user, the unit above is user@1000.service and belongs to the system's manager
    user = any(unit.startswith("user@") for unit in units)
    own = [unit for unit in units if not unit.startswith("user@")]
    container = _CONTAINER.search(path)
    return Owner(own[-1] if own else None, user and bool(own), container[1][:12] if container else None)


def waits_on(host: Host, pid: int) -> str:
    """On what a process in uninterruptible sleep waits: the kernel's function, and the files it has open."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(host.read_text(f"/proc/{pid}/wchan").strip() or "unknown")
    result = host.run(["find", f"/proc/{pid}/fd", "-maxdepth", "1", "-type", "l", "-printf", "%l\\n"])
    files = [
        line for line in result.out.splitlines() if line.startswith("/") and not line.startswith("/dev/")
    ]
    if files:
        parts.append("open: " + ", ".join(sorted(set(files))[:3]))
    return "; ".join(parts) or "unknown"
