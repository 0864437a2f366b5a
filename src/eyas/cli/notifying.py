"""Sending messages, and the process that watches a run from outside and outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eyas.base.errors import ConfigError, UsageError
from eyas.base.process import process_start_ticks
from eyas.config.machines import NotifyConfig
from eyas.pipeline.attempt import attempt_folders
from eyas.pipeline.lock import current_holder
from eyas.report.notices import Notice, notices
from eyas.report.status import project_status
from eyas.stages.project import Project

LOOK_SECONDS = 15.0
_ENV = "env:"

Send = Callable[[Notice], None]


def sender(settings: NotifyConfig) -> Send:
    """A function that sends a notice to every address of ``notify.urls``.

    Raises:
        ConfigError: there is no address, or one that apprise does not know.
        UsageError: apprise is not installed.
    """
    try:
        import apprise
    except ModuleNotFoundError as error:
        raise UsageError(
            "apprise is not installed", why=str(error), hint="pip install 'eyas[notify]'"
        ) from error
    if not settings.urls:
        raise ConfigError("there is nobody to tell", where="notify.urls in eyas.toml")
    service = apprise.Apprise()
    for number, url in enumerate(settings.urls, 1):
        # an address may hold a password: it is named by its place
        if not service.add(_address(url)):
            raise ConfigError(
                f"address {number} of notify.urls cannot be used",
                where="notify.urls in eyas.toml",
                why="apprise does not know its kind, or a part of it is missing",
            )

    def send(notice: Notice) -> None:
        if notice.kind in settings.on and not service.notify(title=notice.title, body=notice.text):
            sys.stderr.write(f"not delivered: {notice.title}\n")
            sys.stderr.flush()

    return send


def _address(url: str) -> str:
    if not url.startswith(_ENV):
        return url
    name = url.removeprefix(_ENV)
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the variable {name} is not set", where="notify.urls in eyas.toml")
    return value


@dataclass(frozen=True)
class Watched:
    """A process that runs the pipeline, and how many attempts there were before it."""

    pid: int
    attempts: int


def watch(
    open_project: Callable[[], Project],
    send: Send,
    *,
    suffix: str,
    every: float,
    run: Watched | None,
    ready: Callable[[], None],
) -> None:
    """Look at a project again and again and send what changed.

    Args:
        ready: called after the first look: what changes from now on is told.
        every: seconds between two looks.
        run: end when this process is gone; None goes on for ever.
    """
    started = process_start_ticks(run.pid) if run is not None else 0
    before = project_status(open_project(), suffix)
    if run is not None and before.num_attempts > run.attempts:
        # it was quicker than this process was to start: its end is still to be told
        before = replace(before, running=None, last_attempt=None)
    ready()
    while True:
        is_over = run is not None and (not started or process_start_ticks(run.pid) != started)
        after = project_status(open_project(), suffix)
        for notice in notices(before, after):
            send(notice)
        before = after
        if is_over:
            return
        time.sleep(every)


def watch_from_outside(project: Project, words: Sequence[str]) -> None:
    """Start ``eyas notify`` for this process when there is somebody to tell; it outlives a kill.

    Args:
        words: options that name the project.
    """
    if not project.config.notify.urls or current_holder(project.layout.state) is not None:
        return
    log: Path = project.layout.logs / "notify.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "eyas",
                "notify",
                *words,
                "--pid",
                str(os.getpid()),
                "--attempts",
                str(len(attempt_folders(project.layout.logs))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
