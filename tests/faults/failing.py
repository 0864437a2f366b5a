"""Faults planted in a child: the n-th call of a system function or of SQLite fails."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

OS_CALLS = ("write", "fsync", "fdatasync", "rename", "replace", "unlink", "posix_fallocate", "mkdir")
KINDS = ("ENOSPC", "EIO", "EINTR", "short")
SQLITE_KINDS = ("full", "io", "full after", "io after")


def fail_call(number: int, kind: str, mark: Path) -> Callable[[], None]:
    """A plan: the ``number``-th call (from 1) of any of `OS_CALLS` fails as ``kind`` says.

    ``short`` makes a write take only half of its bytes, and any other call fail with EDQUOT. ``mark``
    appears when the fault fires, so that faults are counted and not guessed.
    """

    def plant() -> None:
        calls = [0]

        def wrap(name: str) -> None:
            real = getattr(os, name)

            def counted(*arguments: object, **options: object) -> object:
                calls[0] += 1
                if calls[0] != number:
                    return real(*arguments, **options)
                _note(mark, f"{name} {kind}")
                if kind == "short" and name == "write":
                    descriptor, data = arguments
                    return real(descriptor, memoryview(data)[: max(1, len(data) // 2)])  # type: ignore[arg-type]
                code = getattr(errno, "EDQUOT" if kind == "short" else kind)
                raise OSError(code, os.strerror(code))

            setattr(os, name, counted)

        for name in OS_CALLS:
            wrap(name)

    return plant


def fail_behind_seal(number: int, mark: Path) -> Callable[[], None]:
    """A plan: the disk is full when the ``number``-th sealed folder (from 1) has just got its name."""

    def plant() -> None:
        from eyas.base import seal
        from eyas.base.files import TEMPORARY_SUFFIX

        real, calls = seal.fsync_folder, [0]

        def fails(folder: Path) -> None:
            if not any(part.endswith(TEMPORARY_SUFFIX) for part in folder.parts):
                calls[0] += 1
                if calls[0] == number:
                    _note(mark, f"behind {folder.name}")
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(folder)

        seal.fsync_folder = fails

    return plant


def fail_statement(number: int, kind: str, mark: Path) -> Callable[[], None]:
    """A plan: the ``number``-th statement of SQLite fails; ``after``: though it was carried out."""

    def plant() -> None:
        calls = [0]

        def failing(real: Callable[..., sqlite3.Cursor], *arguments: object) -> sqlite3.Cursor:
            calls[0] += 1
            if calls[0] != number:
                return real(*arguments)
            _note(mark, f"{kind} {str(arguments[0]).split()[0]}")
            if kind.endswith("after"):
                real(*arguments)
            full = kind.startswith("full")
            error = sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR_WRITE
            error.sqlite_errorname = "SQLITE_FULL" if full else "SQLITE_IOERR_WRITE"
            raise error

        class Failing(sqlite3.Connection):
            def execute(self, *arguments: object) -> sqlite3.Cursor:  # type: ignore[override]
                return failing(super().execute, *arguments)

            def executemany(self, *arguments: object) -> sqlite3.Cursor:  # type: ignore[override]
                return failing(super().executemany, *arguments)

        real_connect = sqlite3.connect

        def connect(*arguments: object, **options: object) -> sqlite3.Connection:
            return real_connect(*arguments, factory=Failing, **options)  # type: ignore[call-overload,no-any-return]

        sqlite3.connect = connect  # type: ignore[assignment]

    return plant


def _note(mark: Path, text: str) -> None:
    """Append without any function that a plan has wrapped."""
    with open(mark, "a") as file:
        file.write(text + "\n")


def fired(mark: Path) -> list[str]:
    """The faults that fired so far."""
    return mark.read_text().splitlines() if mark.exists() else []
