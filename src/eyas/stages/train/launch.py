"""Training processes: started here beside this one, or found started by an outer torchrun.

This process is the first of them: it alone writes, and holds the project's lock. The others
(`eyas.stages.train.worker`) end with it: they watch a pipe from it. What ends one of them is left on a
board that all see, so that the first can raise it as its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from eyas.base.errors import EyasError, WorkerLost
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.drafter.world import World
from eyas.stages.project import Project
from eyas.stages.train.meeting import Board, leave
from eyas.stages.train.outer import OuterPlace

START_SECONDS = 300.0
"""Longest wait for processes to start."""
TOLD_SECONDS = 5.0
"""How long after the loss of a process its reason is waited for."""
GRACE_SECONDS = {"cpu": 600.0, "cuda": 30.0}
"""How long after the death of a process this one may go on without noticing before it is ended too. On the
CPU it notices at its next exchange, which a long step may hold up."""
END_SECONDS = 15.0
"""How long the others may take to end once this one is done."""
MEETING = "training"
_LOOK_SECONDS = 0.05


@dataclass
class _Helper:
    """One of the other processes on this machine."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path

    def fate(self) -> WorkerLost | None:
        """How it ended; None while it runs or if it ended well."""
        code = self.process.poll()
        if not code:
            return None
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return WorkerLost(
            f"training process {self.rank} (pid {self.process.pid}) ended {how}",
            where=self.log,
            why=_last_line(self.log),
            hint="eyas run resumes from the newest checkpoint",
        )


class Helpers:
    """The processes that this one starts, ranks 1 and up, and what becomes of them.

    Args:
        size: processes in all, this one included.
        threads: CPU threads of each.
        logs: folder for their output.
    """

    def __init__(self, project: Project, size: int, threads: int, logs: Path) -> None:
        self.board = Board.of_this_machine()
        self.size = size
        self._project = project
        self._helpers: list[_Helper] = []
        self._noticed = threading.Event()
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(1, size):
                self._helpers.append(self._start(rank, threads, logs / f"rank-{rank}.log"))
        except BaseException:
            self.end(0.0)
            raise

    def _start(self, rank: int, threads: int, log: Path) -> _Helper:
        brief = {
            "root": str(self._project.layout.root),
            "config": self._project.config.model_dump(mode="json"),
            "port": self.board.port,
            "rank": rank,
            "size": self.size,
            "log": str(log),
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "eyas.stages.train.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # one that ended at once is found by its exit code
            process.stdin.write(json.dumps(brief).encode() + b"\n")
            process.stdin.flush()  # and left open: it ends when this process does
        return _Helper(rank, process, log)

    def await_ready(self, stop: StopFlag) -> None:
        """Until all have started. Raises WorkerLost, what one of them has told, or Stopped."""
        deadline = time.monotonic() + START_SECONDS
        waiting = [helper.rank for helper in self._helpers]
        while waiting:
            stop.check()
            waiting = [rank for rank in waiting if self.board.get(ready_key(rank)) is None]
            reason = self.reason(0.0) if any(helper.fate() for helper in self._helpers) else None
            if reason is not None:
                raise reason
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"training processes {waiting} did not start in {START_SECONDS:g} s",
                    where=self._helpers[0].log.parent,
                    hint="eyas run",
                )
            time.sleep(_LOOK_SECONDS)

    def reason(self, patience: float = TOLD_SECONDS) -> EyasError | None:
        """What one of them has told, or how one ended; None when all seem well."""
        self._noticed.set()
        deadline = time.monotonic() + patience
        while True:
            for helper in self._helpers:
                told = self.board.told_by(helper.rank)
                if told is not None:
                    return told
            fates = [fate for fate in (helper.fate() for helper in self._helpers) if fate is not None]
            if fates:
                return fates[0]
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)

    @contextmanager
    def watched(self, progress: Progress, grace: float) -> Iterator[None]:
        """End this process if one of them is dead and this one has not noticed after a while.

        An exchange between devices may wait for a dead process without end, and nothing in Python can
        break it off. One that has noticed (`reason`) may save its state in peace.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                fate = next((f for f in (helper.fate() for helper in self._helpers) if f is not None), None)
                if fate is None:
                    continue
                if not self._noticed.wait(grace) and not over.is_set():
                    progress.say(f"{fate.what}; this one still waits for it and is ended: eyas run resumes")
                    os._exit(fate.exit_code)
                return

        thread = threading.Thread(target=watch, name="training processes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self._noticed.set()
            thread.join()

    def end(self, patience: float) -> None:
        """Let them end, ask those that do not, and kill those that do not hear."""
        for helper in self._helpers:
            if helper.process.stdin is not None:
                with suppress(OSError):
                    helper.process.stdin.close()
        for wait, number in ((patience, signal.SIGTERM), (END_SECONDS, signal.SIGKILL)):
            deadline = time.monotonic() + wait
            for helper in self._helpers:
                with suppress(subprocess.TimeoutExpired):
                    helper.process.wait(max(0.0, deadline - time.monotonic()))
            for helper in self._helpers:
                if helper.process.poll() is None:
                    helper.process.send_signal(number)
        for helper in self._helpers:
            helper.process.wait()


@contextmanager
def started(
    project: Project, size: int, device: str, threads: int, logs: Path, progress: Progress, stop: StopFlag
) -> Iterator[World]:
    """The world of this process and ``size`` - 1 others that are started for it on this machine.

    Raises:
        WorkerLost: they did not start.
        Stopped: a stop was asked for meanwhile.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    helpers = Helpers(project, size, threads, logs)
    try:
        helpers.await_ready(stop)
        with helpers.watched(progress, GRACE_SECONDS["cuda" if device.startswith("cuda") else "cpu"]):
            helpers.board.join(0, size, device, MEETING)
            yield World(0, size, reason_of_loss=helpers.reason)
    finally:
        leave()
        helpers.end(END_SECONDS)


def outer_board(place: OuterPlace) -> Board:
    """The board of the processes that an outer launcher started."""
    return Board(place.address, place.port, serve=place.first and not place.has_board)


_met = False


@contextmanager
def outer(place: OuterPlace, device: str) -> Iterator[World]:
    """The world of the processes that an outer launcher started, this one the first.

    Raises:
        WorkerLost: they have met already, and left.
    """
    global _met
    if _met:
        raise WorkerLost(
            "the processes of the outer launcher have left", hint="start it again: training goes on"
        )
    _met = True
    board = outer_board(place)

    def reason() -> EyasError | None:
        deadline = time.monotonic() + TOLD_SECONDS
        others = [rank for rank in range(place.size) if rank != place.rank]
        while time.monotonic() < deadline:
            for told in map(board.told_by, others):
                if told is not None:
                    return told
            time.sleep(_LOOK_SECONDS)
        return None

    board.put(place.go_key, "train")
    board.join(place.rank, place.size, device, place.meeting)
    try:
        yield World(place.rank, place.size, reason_of_loss=reason)
    finally:
        leave()


def ready_key(rank: int) -> str:
    """Where a process says that it has started."""
    return f"ready/{rank}"


def _last_line(log: Path) -> str | None:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else None
    return None
