"""The processes of one server: started in a group of their own, found again, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from eyas.base.clock import Clock
from eyas.base.errors import ServerNotStopped
from eyas.base.process import ProcessIdentity, is_running
from eyas.base.units import format_seconds
from eyas.targets.serving.gpu import gpu_processes

MARKER = "EYAS_SERVER"
"""Environment variable that every process of a server inherits; its value is the server's own."""

_KILL_SECONDS = 10.0
_children: dict[ProcessIdentity, subprocess.Popen[bytes]] = {}
"""Servers that this very process started: only their parent learns how they ended."""

_WORKER_TITLES = ("VLLM::", "sglang::")
_STEP = 0.1
_PORTS = range(20_000, 32_768)


class EngineProcess:
    """A server's first process and everything it started.

    Args:
        identity: the first process, leader of its group.
        marker: value of `MARKER` in its environment.
        popen: the child, when this process has just started it.
    """

    def __init__(
        self, identity: ProcessIdentity, marker: str, popen: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.identity, self.marker = identity, marker
        if popen is not None:
            _children[identity] = popen
        self._popen = _children.get(identity)
        self._workers: set[ProcessIdentity] = set()

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, marker: str
    ) -> EngineProcess:
        """Start a command; its output goes to ``log``, which must be new.

        Raises:
            OSError: it cannot be started, or the log cannot be written.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "xb") as output:
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, MARKER: marker},
                cwd=folder,
                start_new_session=True,
            )
        return cls(ProcessIdentity.of(popen.pid), marker, popen)

    @property
    def leader_alive(self) -> bool:
        if self._popen is not None:
            return self._popen.poll() is None
        return self.identity.alive

    def how_it_ended(self) -> str:
        """Exit code or signal of a first process that is gone."""
        code = self._popen.poll() if self._popen is not None else None
        if code is None:
            return "it is gone"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def members(self) -> set[ProcessIdentity]:
        """Everything of this server that runs now, wherever it stands in the process tree."""
        found: set[ProcessIdentity] = set()
        leader = self.identity
        # once the leader is gone its number may be another group's; the marker is never anybody else's
        group_is_ours = ProcessIdentity.of(leader.pid) == leader
        for pid in psutil.pids():
            identity = ProcessIdentity.of(pid)
            if not is_running(pid):
                continue
            if identity == leader or (group_is_ours and self._in_group(pid)) or self._marked(pid):
                found.add(identity)
        return found

    def _in_group(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return os.getpgid(pid) == self.identity.pid
        return False

    def _marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            wanted = f"{MARKER}={self.marker}".encode()
            return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def remember_workers(self) -> None:
        """Note the engine's worker processes, to see later whether one has gone."""
        self._workers = {member for member in self.members() if _is_worker(member.pid)}

    @property
    def worker_gone(self) -> bool:
        """Whether a worker that was noted no longer runs."""
        return any(not worker.alive for worker in self._workers)

    def end(self, patience: float, clock: Clock) -> None:
        """End everything of this server: asked first, then killed.

        Args:
            patience: seconds between asking and killing.

        Raises:
            ServerNotStopped: something survived being killed.
        """
        left = self.members()
        if self.leader_alive:
            _signal([self.identity], signal.SIGTERM)
        else:
            _signal(left, signal.SIGTERM)
        left = self._await_end(patience, clock)
        if left:
            _signal(left, signal.SIGKILL)
            left = self._await_end(_KILL_SECONDS, clock)
        if self._popen is not None and self._popen.poll() is not None:
            _children.pop(self.identity, None)  # its end is known, and nothing of it stays as a zombie
        if left:
            raise ServerNotStopped(
                "a server was killed and still runs",
                where=", ".join(f"process {member.pid}" for member in sorted(left, key=lambda m: m.pid)),
                why="a process that waits inside a driver cannot be ended",
                hint="look for it in nvidia-smi; ending the container or the machine frees it",
            )

    def _await_end(self, seconds: float, clock: Clock) -> set[ProcessIdentity]:
        deadline = clock.now() + seconds
        while True:
            left = self.members()
            # a first process whose other threads are still ending counts as a zombie and cannot be reaped yet
            reaped = self._popen is None or self._popen.poll() is not None
            if (reaped and not left) or clock.now() >= deadline:
                return left
            clock.sleep(_STEP)


def prove_released(
    members: set[ProcessIdentity], host: str, port: int | None, patience: float, clock: Clock
) -> str:
    """Wait until a stopped server's port is free and its GPU memory is given back.

    Args:
        members: its processes, as they were before it was ended.
        port: None when it never was the server's own.

    Returns:
        ``released``, or ``not checked: WHY`` for the GPU where it cannot be asked.

    Raises:
        ServerNotStopped: port or memory is still taken after ``patience`` seconds.
    """
    deadline = clock.now() + patience
    while True:
        taken = [] if port is None or port_free(host, port) else [f"port {port} is taken"]
        on_gpu, why = gpu_processes()
        taken += [f"process {m.pid} holds GPU memory" for m in members if m.pid in on_gpu]
        if not taken:
            return f"not checked: {why}" if why else "released"
        if clock.now() >= deadline:
            raise ServerNotStopped(
                "a stopped server has not given everything back",
                where=f"{host}:{port}",
                why=f"{'; '.join(taken)}, {format_seconds(patience)} after it ended",
                hint="eyas serve status",
            )
        clock.sleep(_STEP)


def port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def other_listener(port: int, members: set[ProcessIdentity]) -> int | None:
    """Number of a process outside ``members`` that listens on ``port``; None when no such is known.

    Args:
        members: processes of one server. With any of them listening, the answer is None.
    """
    ours = {member.pid for member in members}
    listening: set[int] = set()
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid is not None:  # without a number it is another user's
                listening.add(connection.pid)
    return None if listening & ours else min(listening, default=None)


def free_port(host: str) -> int:
    """A port that nobody listens on at this moment.

    Drawn below those that systems give out by themselves: an engine takes up to minutes until it listens,
    and meanwhile any program that asks for "some port" could be given the same one.
    """
    for _ in range(64):
        port = secrets.choice(_PORTS)
        if port_free(host, port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def log_tail(path: Path, num_lines: int = 20) -> str:
    """The last lines of a log, without reading all of it; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-num_lines:])


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline()).startswith(_WORKER_TITLES)
    return False


def _signal(members: set[ProcessIdentity] | list[ProcessIdentity], number: signal.Signals) -> None:
    for member in members:
        if member.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)
