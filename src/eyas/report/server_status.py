"""Servers of the project as its records and the process table tell of them; none of them is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.stages.project import Project

_DUMP_SUFFIX = ".dump"


@dataclass(frozen=True)
class ServerStatus:
    """One server.

    ``state`` is ``running`` (proven, and its process is alive), ``starting`` (not proven yet), ``ended`` (its
    process is gone), or ``foreign``: one of ``serve.urls`` or ``serve.last_urls``, of which only its own
    answer would tell more (``eyas serve status``). ``used_by`` is the process of eyas that works with it,
    ``kept`` says that only ``eyas serve stop`` ends it, and ``num_dumps`` wait to be taken.
    """

    index: int
    engine: str
    mode: str
    url: str
    state: Literal["running", "starting", "ended", "foreign"]
    pid: int | None
    since: str | None
    used_by: int | None
    kept: bool
    num_dumps: int


def server_status(project: Project) -> tuple[ServerStatus, ...]:
    """Every server that is written down or declared.

    Raises:
        DamageFound: the list of servers is not what eyas wrote.
    """
    serve, found = project.config.serve, []
    if project.layout.servers.exists():
        from eyas.targets.serving.records import ServerBook  # only where servers were ever started

        for record in ServerBook(project.layout.servers).read():
            alive = record.process.alive
            found.append(
                ServerStatus(
                    index=record.index,
                    engine=record.engine,
                    mode=record.mode,
                    url=record.url,
                    state=("running" if record.ready else "starting") if alive else "ended",
                    pid=record.process.pid,
                    since=record.started,
                    used_by=record.opened_by.pid if record.opened_by.alive else None,
                    kept=record.keep,
                    num_dumps=_num_dumps(record.dump_dir),
                )
            )
    engine = serve.engine if serve.engine != "auto" else project.config.target.kind
    for index, url in enumerate(serve.every_url):
        found.append(ServerStatus(index, engine, "", url, "foreign", None, None, None, False, 0))
    return tuple(found)


def _num_dumps(dump_dir: str | None) -> int:
    if dump_dir is None or not Path(dump_dir).is_dir():
        return 0
    with os.scandir(dump_dir) as entries:
        return sum(entry.name.endswith(_DUMP_SUFFIX) for entry in entries)


def server_text(server: ServerStatus) -> str:
    """``0 vllm capture running at http://127.0.0.1:4711, process 12, used by process 10, 3 dumps wait``."""
    if server.state == "foreign":
        return f"{server.url}, somebody else's"
    parts = [f"{server.index} {server.engine} {server.mode} {server.state} at {server.url}"]
    if server.state == "ended":
        parts = [f"{server.index} {server.engine} {server.mode} has ended by itself"]
    else:
        parts.append(f"process {server.pid}")
    if server.used_by is not None and server.state != "ended":
        parts.append(f"used by process {server.used_by}")
    elif server.kept and server.state != "ended":
        parts.append("kept until eyas serve stop")
    if server.num_dumps:
        parts.append(f"{server.num_dumps} dump{'' if server.num_dumps == 1 else 's'} wait")
    return ", ".join(parts)
