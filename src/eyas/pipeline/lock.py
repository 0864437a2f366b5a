"""One writer per project.

The lock is a POSIX record lock: the kernel drops it with the process that took it, children do not
inherit it, and it can be asked who holds it, so neither a reused pid nor a descriptor left in a child
can fool it. Beside it a small file names the holder for people.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eyas.base.clock import boot_id, utc_now_text
from eyas.base.errors import ProjectLocked
from eyas.base.files import write_json
from eyas.base.process import process_start_ticks

_FLOCK = "hhqqi"  # struct flock on 64-bit Linux: type, whence, start, length, pid


@dataclass(frozen=True)
class Holder:
    """Who writes to a project."""

    pid: int
    host: str
    since: str
    boot: str
    started_ticks: int
    verb: str


_held: dict[Path, Holder] = {}
"""Locks of this process: closing any descriptor of such a file would drop them, so it is not opened."""


def _paths(state: Path) -> tuple[Path, Path]:
    return state / "writer.lock", state / "writer.json"


def current_holder(state: Path) -> Holder | None:
    """Who holds the lock now, by the kernel's word; None when nobody does.

    A holder on another machine (a shared filesystem) is known only by its note.
    """
    lock_path, note_path = _paths(state.resolve())
    if lock_path in _held:
        return _held[lock_path]
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    finally:
        os.close(descriptor)
    if kind == fcntl.F_UNLCK:
        return None
    note: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(note_path.read_text(encoding="utf-8"))
    if note.get("pid") == pid and note.get("started_ticks") == process_start_ticks(pid):
        return Holder(**note)  # type: ignore[arg-type]
    if note and note.get("host") != socket.gethostname():
        return Holder(**note)  # type: ignore[arg-type]
    return Holder(pid, socket.gethostname(), "unknown", boot_id(), process_start_ticks(pid), "unknown")


def last_holder(state: Path) -> Holder | None:
    """Who held the lock last, by the note alone; None before the first."""
    try:
        return Holder(**json.loads(_paths(state)[1].read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def hold_lock(state: Path, verb: str) -> Iterator[Holder]:
    """Be the one writer while the block runs.

    Raises:
        ProjectLocked: someone else is; the error names process, host and since when.
    """
    state.mkdir(parents=True, exist_ok=True)
    lock_path, note_path = _paths(state.resolve())
    if lock_path in _held:
        raise _locked(state)
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _locked(state) from error
        holder = Holder(
            os.getpid(),
            socket.gethostname(),
            utc_now_text(),
            boot_id(),
            process_start_ticks(os.getpid()),
            verb,
        )
        _held[lock_path] = holder
        write_json(note_path, asdict(holder))
        yield holder
    finally:
        _held.pop(lock_path, None)
        os.close(descriptor)


def _locked(state: Path) -> ProjectLocked:
    holder = current_holder(state)
    if holder is None:
        return ProjectLocked(
            "another eyas is writing to this project", where=state.parent, hint="eyas status"
        )
    return ProjectLocked(
        f"process {holder.pid} on {holder.host} is writing to this project",
        where=state.parent,
        why=f"eyas {holder.verb}, since {holder.since}",
        hint="eyas status shows what it does; eyas stop ends it with its state saved",
    )
