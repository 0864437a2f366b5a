"""``eyas serve start | stop | status | logs``: servers of the target."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Literal

from eyas.base.clock import utc_now_text
from eyas.base.errors import EyasError, UsageError
from eyas.base.stop import StopFlag
from eyas.base.units import format_bytes
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json, table
from eyas.pipeline.lock import hold_lock
from eyas.stages.project import Project

ServeMode = Literal["generate", "capture", "draft"]


def start(
    *,
    mode: ServeMode = "generate",
    export: str = "",
    dry_run: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Start servers, prove them, and leave them running; eyas run then uses them.

    Args:
        mode: generate answers prompts, capture hands out states, draft serves an exported drafter.
        export: name below exports/ of the drafter to serve; the configured one when left out.
        dry_run: print the command and start nothing.
    """
    from eyas.targets.serving.launch import plan_launch
    from eyas.targets.serving.manager import Servers

    project = common.open()
    layout = project.layout
    drafter = layout.exports / (export or project.config.export.name) if mode == "draft" else None
    launch = plan_launch(project.config, project.resolved, mode, drafter)
    if dry_run:
        command = launch.command(0, None)
        if common.json:
            print_json({"mode": mode, "engine": launch.engine, "command": command})
        else:
            import shlex

            print(shlex.join(command))
            note("the port, and for capture the dump folder, are chosen at the start")
            next_command(f"eyas serve start --mode {mode}{common.suffix}")
        return 0
    stop_flag = StopFlag()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: stop_flag.request(received))
    stamp = utc_now_text().replace(":", "").replace("-", "").split(".")[0]
    with hold_lock(layout.state, "serve start"):
        servers = Servers.open(
            project.config,
            layout.root,
            mode,
            log_folder=layout.logs / "servers" / stamp,
            drafter=drafter,
            stop=stop_flag,
            say=(lambda line: None) if common.json else note,
            keep=True,
        )
    if common.json:
        found = [{"index": s.index, "url": s.url, "pid": s.pid, "log": s.log} for s in servers.servers]
        print_json({"mode": mode, "engine": launch.engine, "servers": found})
    else:
        next_command(f"eyas serve stop{common.suffix}, when you no longer need them")
    return 0


def stop(
    *,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Stop servers that no running eyas works with: ask, then kill; process, port and GPU are looked at."""
    from eyas.targets.serving.overview import stop_servers
    from eyas.targets.serving.records import ServerBook

    project = common.open()
    stopped, in_use = stop_servers(ServerBook(project.layout.servers), project.config.serve)
    if common.json:
        gone = [{"pid": r.process.pid, "url": r.url, "mode": r.mode, "gpu": gpu} for r, gpu in stopped]
        print_json({"stopped": gone, "in_use": [r.process.pid for r in in_use]})
    else:
        for record, gpu in stopped:
            note(
                f"server {record.index} ({record.engine}, {record.mode}): no process left, port "
                f"{record.port} free, GPU memory {gpu}"
            )
        for record in in_use:
            note(f"server {record.index} is in use by eyas process {record.opened_by.pid}")
        if not stopped and not in_use:
            note("no server runs")
        next_command(f"eyas stop{common.suffix}" if in_use else None)
    return 0


def status(
    *,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Which servers run, in which mode, and how they answer."""
    from eyas.targets.serving.overview import look_at_servers
    from eyas.targets.serving.records import ServerBook

    project = common.open()
    views = look_at_servers(ServerBook(project.layout.servers), project.config.serve)
    if common.json:
        print_json({"servers": [view.as_dict() for view in views], "urls": project.config.serve.every_url})
        return 0
    rows = [
        [
            view.record.index,
            f"{view.record.engine} {view.record.mode}",
            view.state,
            view.record.url,
            view.record.process.pid,
            f"{view.num_dumps} ({format_bytes(view.dump_bytes)})" if view.record.dump_dir else "-",
        ]
        for view in views
    ]
    columns = ["server", "what", "state", "address", "process", "dumps waiting"]
    if rows:
        table(None, columns, rows)
    else:
        note("no server of eyas runs")
    for url in project.config.serve.every_url:
        note(f"somebody else's server: {url}")
    for view in views:
        if view.used_by is not None:
            note(f"server {view.record.index} is used by eyas process {view.used_by}")
        elif view.record.keep:
            note(f"server {view.record.index} was started by eyas serve start and runs until eyas serve stop")
    next_command(f"eyas serve stop{common.suffix}" if rows else f"eyas serve start{common.suffix}")
    return 0


def logs(
    *,
    server: int = 0,
    lines: int = 40,
    follow: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Print the last lines of a server's output: of one that runs, or else of the last that was started.

    Args:
        server: number of the replica.
        lines: how many lines.
        follow: go on as more come, until the server ends.
    """
    from eyas.targets.serving.process import log_tail
    from eyas.targets.serving.records import ServerBook
    from eyas.targets.serving.starting import running

    project = common.open()
    records = [r for r in ServerBook(project.layout.servers).read() if r.index == server]
    path = Path(records[-1].log) if records else _newest_log(project, server)
    if path is None:
        raise UsageError(f"server {server} was never started here", hint=f"eyas serve status{common.suffix}")
    if common.json:
        print_json({"log": str(path), "lines": log_tail(path, lines).splitlines()})
        return 0
    note(str(path))
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            sys.stdout.write("\n".join(file.read().splitlines()[-lines:]) + "\n")
            while follow and records and running(records[-1]):
                sys.stdout.write(file.read())
                sys.stdout.flush()
                time.sleep(0.5)
            sys.stdout.write(file.read())
    except OSError as error:
        raise EyasError("the log cannot be read", where=path, why=str(error)) from error
    return 0


def _newest_log(project: Project, server: int) -> Path | None:
    found = list(project.layout.logs.glob(f"**/server-*-{server}*.log"))
    return max(found, key=lambda path: path.stat().st_mtime) if found else None
