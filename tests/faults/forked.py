"""Runs of a project in forked children, so that killing one costs no start of Python.

The parent has torch and transformers loaded; a child runs the pipeline and is killed at an instant or
at the n-th call of a system function.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from eyas.base.errors import EyasError
from eyas.base.progress import SilentProgress
from eyas.pipeline.order import STAGES
from eyas.pipeline.run import run
from eyas.stages.project import Project
from eyas.stages.protocol import Stage

KILLED = -signal.SIGKILL


ERRORS = Path(tempfile.mkdtemp(prefix="eyas-errors-"))
"""Errors of children by project: a project's own disk may be the thing that fails."""


def error_of(root: Path) -> str:
    """What the last run of a project that failed ended with."""
    path = ERRORS / root.as_posix().replace("/", "-")
    return path.read_text() if path.exists() else ""


def _keep_error(root: Path, text: str) -> None:
    (ERRORS / root.as_posix().replace("/", "-")).write_text(text)
    with contextlib.suppress(OSError):
        (root / "last-error.txt").write_text(text)


def run_here(root: Path, stages: Sequence[Stage] = STAGES, overrides: Sequence[str] = ()) -> int:
    """Run a project in this process; returns the exit code."""
    torch.set_num_threads(1)
    try:
        run(
            Project.open(root, overrides),
            verb="run",
            progress=lambda stage: SilentProgress(),
            stages=stages,
        )
    except EyasError as error:
        _keep_error(root, str(error))
        return error.exit_code
    except Exception:
        _keep_error(root, traceback.format_exc())
        return 1
    return 0


def start_child(root: Path, prepare: Callable[[], None] = lambda: None, overrides: Sequence[str] = ()) -> int:
    """Run a project in a child; returns its pid at once."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            prepare()
            code = run_here(root, overrides=overrides)
        finally:
            os._exit(code)
    return child


def run_child(
    root: Path,
    *,
    kill_after_seconds: float | None = None,
    prepare: Callable[[], None] = lambda: None,
    overrides: Sequence[str] = (),
) -> int:
    """Run a project in a child; returns its exit code, or `KILLED`.

    Args:
        kill_after_seconds: kill it then, if it still runs.
        prepare: called in the child first, to plant a fault.
    """
    child = start_child(root, prepare, overrides)
    deadline = None if kill_after_seconds is None else time.monotonic() + kill_after_seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.002)


def kill_at_call(names: Sequence[str], number: int) -> Callable[[], None]:
    """A plan that kills the child at the ``number``-th call (from 1) of any of these os functions.

    Odd numbers are killed before the call, even ones after it.
    """

    def plant() -> None:
        calls = [0]

        def wrap(name: str) -> None:
            real = getattr(os, name)

            def counted(*arguments: object, **options: object) -> object:
                calls[0] += 1
                if calls[0] == number and number % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*arguments, **options)
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(os, name, counted)

        for name in names:
            wrap(name)

    return plant
