"""Servers of a project as any process can see them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.clock import Clock, SystemClock
from eyas.base.process import ProcessIdentity
from eyas.config.servers import ServeConfig
from eyas.targets.serving.address import Address
from eyas.targets.serving.dumps import DUMP_SUFFIXES
from eyas.targets.serving.records import ServerBook, ServerRecord
from eyas.targets.serving.starting import running, stop_server


@dataclass(frozen=True)
class ServerView:
    """One server now.

    Args:
        state: ``running``; ``starting`` (not yet proven); ``ended`` (its first process is gone);
            ``failing`` or ``silent``, as it answers.
        used_by: process of eyas that works with it; None when none does.
        num_dumps: dumps that wait to be taken.
        dump_bytes: their size.
    """

    record: ServerRecord
    state: str
    used_by: int | None
    num_dumps: int
    dump_bytes: int

    def as_dict(self) -> dict[str, Any]:
        record = self.record
        return {
            "index": record.index,
            "engine": record.engine,
            "mode": record.mode,
            "state": self.state,
            "url": record.url,
            "pid": record.process.pid,
            "started": record.started,
            "kept": record.keep,
            "used_by": self.used_by,
            "model": record.model,
            "dump_dir": record.dump_dir,
            "dumps": self.num_dumps,
            "dump_bytes": self.dump_bytes,
            "log": record.log,
        }


def look_at_servers(book: ServerBook, serve: ServeConfig) -> list[ServerView]:
    """Every server that is written down, asked for its health. Raises DamageFound as `ServerBook.read`."""
    views = []
    key = os.environ.get(serve.api_key_env) if serve.api_key_env else None
    for record in book.read():
        if not running(record):
            state = "ended"
        else:
            answer = Address(record.url, key).health()
            state = {"ok": "running", "refused": "starting"}.get(answer, answer)
            if answer == "refused" and record.ready:
                state = "failing"
            if answer == "ok" and not record.ready:
                state = "starting"
        num, size = _dumps(record)
        used = record.opened_by.pid if record.opened_by.alive else None
        views.append(ServerView(record, state, used, num, size))
    return views


def stop_servers(
    book: ServerBook, serve: ServeConfig, clock: Clock | None = None, *, keep_dumps: bool = False
) -> tuple[list[tuple[ServerRecord, str]], list[ServerRecord]]:
    """Stop every server that no other process of eyas works with.

    Args:
        keep_dumps: leave their dump folders and what is in them.

    Returns:
        Those that were stopped, each with what is known of its GPU memory, and those in use.

    Raises:
        ServerNotStopped: one cannot be ended.
    """
    me = ProcessIdentity.of(os.getpid())
    stopped, in_use = [], []
    for record in book.read():
        if record.opened_by != me and record.opened_by.alive:
            in_use.append(record)
        else:
            patience = serve.stop_seconds
            gpu = stop_server(record, book, patience, clock or SystemClock(), keep_dumps=keep_dumps)
            stopped.append((record, gpu))
    return stopped, in_use


def _dumps(record: ServerRecord) -> tuple[int, int]:
    num = size = 0
    folder = Path(record.dump_dir) if record.dump_dir else None
    for path in folder.iterdir() if folder is not None and folder.is_dir() else []:
        if path.suffix in DUMP_SUFFIXES:
            try:
                num, size = num + 1, size + path.stat().st_size
            except FileNotFoundError:
                continue
    return num, size
