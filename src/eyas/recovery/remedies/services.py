"""A service that holds the GPUs, or would take them at boot: stopped, disabled, masked, proven by memory.

Order: stop (which may hang), its process group, disable and mask, the container's host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.base.errors import HostUnreachable
from eyas.base.units import counted, format_bytes
from eyas.hosts.host import Host
from eyas.hosts.processes import list_processes, owner_of
from eyas.hosts.units import show_unit, systemctl
from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.checks.gpus import HELD_SHARE
from eyas.recovery.findings import Finding
from eyas.recovery.scene import Scene

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class StopService:
    """Frees the GPUs from one unit for now and for the next boot."""

    finding: Finding

    @property
    def unit(self) -> str:
        return str(self.finding.detail["unit"])

    @property
    def user(self) -> bool:
        return bool(self.finding.detail.get("user"))

    def blocked(self, bench: Bench) -> str | None:
        if bench.may_stop_services or self.unit in bench.scene.project.config.recovery.may_stop:
            return None
        return (
            f"{self.unit} is not ours: eyas recover --yes-stop-services, "
            f'or in eyas.toml: recovery.may_stop = ["{self.unit}"]'
        )

    def ways(self, bench: Bench) -> Sequence[Way]:
        ways = [
            Way(f"systemctl stop {self.unit}", lambda: self._systemctl(bench, ["stop", "--", self.unit])),
            Way("SIGTERM, then SIGKILL to its process group", lambda: self._end_group(bench)),
            Way(f"disable and mask {self.unit}", lambda: self._keep_down(bench)),
        ]
        if bench.scene.project.config.recovery.container_host is not None:
            ways.append(Way("the container's host", lambda: self._from_outside(bench)))
        return ways

    def _systemctl(self, bench: Bench, words: Sequence[str], host: Host | None = None) -> str:
        patience = bench.scene.project.config.recovery.stop_seconds
        result = systemctl(host or bench.scene.host, self.user, words, patience)
        return "done" if result.ok else result.explain()

    def _keep_down(self, bench: Bench, host: Host | None = None) -> str:
        said = [self._systemctl(bench, [verb, "--", self.unit], host) for verb in ("disable", "mask")]
        ended = self._end_group(bench) if host is None else ""  # a unit that restarts itself came back
        return f"disable: {said[0]}; mask: {said[1]}" + (f"; {ended}" if ended else "")

    def _members(self, scene: Scene) -> dict[int, int]:
        """Processes of the unit by its control group, each with its process group; never one of ours."""
        own, mine = scene.own_pids, os.getpgid(0)
        found = {}
        for process in list_processes(scene.host):
            if process.pid in own or process.pgid in (0, mine) or process.pid == 1:
                continue
            if owner_of(scene.host, process.pid).unit == self.unit:
                found[process.pid] = process.pgid
        return found

    def _end_group(self, bench: Bench) -> str:
        members = self._members(bench.look())
        if not members:
            return "no process of it is left"
        patience = bench.scene.project.config.recovery.stop_seconds
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
            self._signal(members, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                left = self._members(bench.look())
                if not left:
                    return f"{counted(len(members), 'process', 'processes')} ended ({number.name})"
                time.sleep(_POLL_SECONDS)
            members = left
        return f"{len(members)} processes do not end"

    def _signal(self, members: dict[int, int], number: signal.Signals) -> None:
        groups = {pgid for pid, pgid in members.items() if pgid in members}  # its leader belongs to the unit
        for pgid in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pgid, number)
        for pid, pgid in members.items():
            if pgid not in groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _from_outside(self, bench: Bench) -> str:
        try:
            host = bench.container_host()
            assert host is not None
            stopped = self._systemctl(bench, ["stop", "--", self.unit], host)
            return f"{host.name}: stop: {stopped}; {self._keep_down(bench, host)}"
        except HostUnreachable as error:
            return f"{error.what}: {error.why}"

    def proof(self, bench: Bench) -> Proof:
        """GPU memory and unit state; memory is given a while to fall."""
        patience = min(30.0, bench.scene.project.config.recovery.stop_seconds)
        deadline = time.monotonic() + patience
        memory = _memory_of(bench.look(), self._pids())
        while memory.held and not memory.alive and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            memory = _memory_of(bench.look(), self._pids())
        state = show_unit(bench.scene.host, self.unit, self.user)
        if state is None:
            outside = self._outside_state(bench)
            down, unit_says = (
                outside is not None and outside[0],
                outside[1] if outside else "systemctl is silent",
            )
        else:
            down = not state.is_active and not state.starts_at_boot
            unit_says = f"{state.active}, {state.enabled or 'not installed'}"
        return Proof(not memory.held and down, f"{self.unit}: {unit_says}; {memory.says}")

    def _pids(self) -> set[int]:
        return {int(pid) for pid in self.finding.detail.get("pids", ())}

    def _outside_state(self, bench: Bench) -> tuple[bool, str] | None:
        with contextlib.suppress(HostUnreachable):
            host = bench.container_host()
            unit = None if host is None else show_unit(host, self.unit, self.user)
            if unit is not None and host is not None:
                down = not unit.is_active and not unit.starts_at_boot
                return down, f"{unit.active}, {unit.enabled or 'not installed'} (by {host.name})"
        return None


@dataclass(frozen=True)
class _Memory:
    held: bool
    alive: bool
    says: str


def _memory_of(scene: Scene, pids: set[int]) -> _Memory:
    """Whether GPU memory is held by these processes, or by nobody that still runs."""
    try:
        gpus = scene.gpu_list or []
    except OSError as error:
        return _Memory(True, False, f"GPU memory is not known ({error.strerror})")
    users = {user.pid for gpu in gpus for user in gpu.users}
    held = bool(users & pids) or any(
        not gpu.users and gpu.used_bytes > HELD_SHARE * gpu.total_bytes for gpu in gpus
    )
    used = ", ".join(format_bytes(gpu.used_bytes) for gpu in gpus)
    return _Memory(held, bool(pids & scene.processes.keys()), f"GPU memory used: {used or 'no GPU'}")
