"""``eyas stop``: ask the writer to end."""

from __future__ import annotations

import os
import signal
import socket
import time

from eyas.base.errors import EyasError
from eyas.base.process import process_start_ticks
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json
from eyas.pipeline.lock import current_holder
from eyas.report.status import project_status
from eyas.stages.project import Project


def stop(*, wait: float = 30.0, common: Common = Common()) -> int:  # noqa: B008 - frozen
    """Ask the running eyas to save its state and end.

    Args:
        wait: seconds to wait until it has ended.
    """
    project = common.open()
    state = project.layout.state
    holder = current_holder(state)
    if holder is None:
        _say(project, common, {"stopped": False, "why": "nothing runs"}, "nothing runs")
        return 0
    if holder.host != socket.gethostname():
        raise EyasError(
            "the writer runs on another machine",
            where=f"process {holder.pid} on {holder.host}",
            hint=f"on {holder.host}: eyas stop{common.suffix}",
        )
    if process_start_ticks(holder.pid) == holder.started_ticks:
        os.kill(holder.pid, signal.SIGTERM)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        now = current_holder(state)
        if now is None or now.pid != holder.pid:
            _say(
                project,
                common,
                {"stopped": True, "pid": holder.pid},
                f"process {holder.pid} has saved its state and ended",
            )
            return 0
        time.sleep(0.1)
    raise EyasError(
        f"process {holder.pid} has not ended after {wait:.0f} s",
        why="it finishes what is in flight first",
        hint=f"eyas stop --wait 120{common.suffix}, or kill -9 {holder.pid}: nothing committed is lost",
    )


def _say(project: Project, common: Common, record: dict[str, object], text: str) -> None:
    if common.json:
        print_json(record)
        return
    note(text)
    next_command(project_status(project, common.suffix).next_command)
