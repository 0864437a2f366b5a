"""Servers that eyas started and has not stopped, kept where any process of eyas finds them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eyas.base.checked import require_check, with_check
from eyas.base.errors import DamageFound
from eyas.base.files import read_json, write_json
from eyas.base.process import ProcessIdentity
from eyas.config.server_arguments import Engine, Mode


@dataclass(frozen=True)
class ServerRecord:
    """One server.

    Args:
        index: which of the replicas.
        digest: hash of what it was started with.
        marker: value of the environment variable that its processes carry.
        process: its first process.
        opened_by: the process of eyas that started it.
        keep: started by ``eyas serve start``: only ``eyas serve stop`` ends it.
    """

    index: int
    engine: Engine
    mode: Mode
    host: str
    port: int
    model: str
    digest: str
    marker: str
    process: ProcessIdentity
    opened_by: ProcessIdentity
    dump_dir: str | None
    log: str
    started: str
    keep: bool
    ready: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def made_ready(self, opened_by: ProcessIdentity) -> ServerRecord:
        """The record of a server that was proven and is used by ``opened_by`` from now on."""
        return replace(self, ready=True, opened_by=opened_by)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> ServerRecord:
        """What `as_dict` gave. Raises KeyError or TypeError."""
        processes = {key: ProcessIdentity.from_dict(table[key]) for key in ("process", "opened_by")}
        return cls(**{**table, **processes})


class ServerBook:
    """The file of all records of a project; every change is made whole, under a lock.

    Args:
        path: ``state/servers.json``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[ServerRecord]:
        """All records; of a server that has ended by itself, too.

        Raises:
            DamageFound: the file is not what eyas wrote.
        """
        try:
            table = require_check(read_json(self._path))
            return [ServerRecord.from_dict(entry) for entry in table["servers"]]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise DamageFound(
                "the list of servers is damaged",
                where=self._path,
                why=str(error),
                hint=f"end servers that still run, then move {self._path.name} away",
            ) from error

    def put(self, record: ServerRecord) -> None:
        """Add a record, in place of the one with the same marker."""
        with self._changing() as records:
            records[record.marker] = record

    def drop(self, marker: str) -> None:
        """Forget a server."""
        with self._changing() as records:
            records.pop(marker, None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, ServerRecord]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            records = {record.marker: record for record in self.read()}
            yield records
            write_json(self._path, with_check({"servers": [r.as_dict() for r in records.values()]}))
        finally:
            os.close(descriptor)
