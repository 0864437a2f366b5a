"""The one way in which eyas runs commands and reads system files, on this machine or another."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

NOT_FOUND = 127
DEFAULT_SECONDS = 10.0
_MOST_OUTPUT_BYTES = 4 << 20
_BLOCK_BYTES = 64 << 10
_KILL_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Result:
    """How a command ended.

    Attributes:
        code: exit code; None when it ran past its deadline and was killed. 127: there is no such command.
    """

    argv: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def timed_out(self) -> bool:
        return self.code is None

    def explain(self) -> str:
        """One line for people: what ran and how it failed."""
        command = " ".join(self.argv[:6])
        if self.timed_out:
            return f"{command}: no answer within {self.seconds:.0f} s"
        lines = [line for line in (self.err or self.out).splitlines() if line.strip()]
        return f"{command}: exit code {self.code}" + (f" ({lines[-1].strip()})" if lines else "")


class Host(Protocol):
    """A machine that runs argument lists; no string is ever given to a shell to take apart.

    Attributes:
        name: what ``eyas.toml`` calls it; ``here`` for this machine.
        is_here: whether paths and process numbers are those of this process.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_here(self) -> bool: ...

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float = DEFAULT_SECONDS, stdin: IO[bytes] | None = None
    ) -> Result:
        """Run a command to its end or its deadline; a code other than 0 is no error here.

        Raises:
            HostUnreachable: the machine does not answer.
        """
        ...

    def stream(self, argv: Sequence[str]) -> int:
        """Run a command with this process's own output, without a deadline; returns its exit code.

        Raises:
            HostUnreachable: the machine does not answer.
        """
        ...

    def read_text(self, path: str) -> str:
        """Content of a small (system) file.

        Raises:
            OSError: it cannot be read.
            HostUnreachable: the machine does not answer.
        """
        ...


def run_here(argv: Sequence[str], timeout_seconds: float, stdin: IO[bytes] | None = None) -> Result:
    """Run a command in a process group of its own, which is killed at the deadline.

    Output goes through files, not pipes: whatever the command leaves behind cannot keep this call waiting.
    A process in uninterruptible sleep is left alone after its kill.
    """
    started = time.monotonic()
    if shutil.which(argv[0]) is None:
        return Result(tuple(argv), NOT_FOUND, "", f"{argv[0]}: not found", 0.0)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(argv),
            stdin=stdin if stdin is not None else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                _kill(process)
        return Result(tuple(argv), code, _text(out), _text(err), time.monotonic() - started)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_PATIENCE_SECONDS)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT_BYTES).decode(errors="replace")


class Here:
    """This machine."""

    name = "here"
    is_here = True

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float = DEFAULT_SECONDS, stdin: IO[bytes] | None = None
    ) -> Result:
        return run_here(argv, timeout_seconds, stdin)

    def stream(self, argv: Sequence[str]) -> int:
        return subprocess.call(list(argv), stdin=subprocess.DEVNULL)

    def read_text(self, path: str) -> str:
        content = bytearray()
        with open(Path(path), "rb", buffering=0) as file:
            # the kernel refuses to give a file of /proc/sys to a read of megabytes
            while len(content) < _MOST_OUTPUT_BYTES and (block := file.read(_BLOCK_BYTES)):
                content += block
        return content.decode(errors="replace")
