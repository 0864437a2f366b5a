"""Stopping processes: asked first, killed after a deadline, always by identity and never by name."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.base.process import process_start_ticks
from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.findings import Finding

_POLL_SECONDS = 0.2


def same_process(pid: int, ticks: int) -> bool:
    """Whether the process that began at ``ticks`` still runs under this number (zombies do not)."""
    if ticks == 0 or process_start_ticks(pid) != ticks:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def signal_and_wait(pid: int, ticks: int, number: signal.Signals, seconds: float) -> bool:
    """Send a signal to exactly that process and wait; True when it is gone."""
    if not same_process(pid, ticks):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not same_process(pid, ticks):
            return True
        time.sleep(_POLL_SECONDS)
    return not same_process(pid, ticks)


@dataclass(frozen=True)
class StopProcess:
    """Ends a process of this project that is stuck or left over; nothing committed is lost by that."""

    finding: Finding
    check: str

    @property
    def _pid(self) -> int:
        return int(self.finding.detail["pid"])

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        ticks = int(self.finding.detail.get("started_ticks") or process_start_ticks(self._pid))
        patience = bench.scene.project.config.recovery.stop_seconds

        def stop() -> str:
            gone = signal_and_wait(self._pid, ticks, signal.SIGTERM, patience)
            return "ended by itself" if gone else f"still there {patience:.0f} s after SIGTERM"

        def kill() -> str:
            gone = signal_and_wait(self._pid, ticks, signal.SIGKILL, 10.0)
            return "killed" if gone else "does not end after SIGKILL: it waits in the kernel"

        return [Way(f"SIGTERM to process {self._pid}", stop), Way(f"SIGKILL to process {self._pid}", kill)]

    def proof(self, bench: Bench) -> Proof:
        left = bench.still([self.finding.key], [self.check])
        return Proof(not left, left[0].what if left else f"process {self._pid} is gone")
