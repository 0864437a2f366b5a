"""The ledger's file: its tables, how it is opened, and what SQLite's errors mean here."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from eyas.base.clock import utc_now_text
from eyas.base.errors import DamageFound, DiskFull, EyasError, FormatTooNew, NotReady, StorageFailed
from eyas.base.storage import is_full

LEDGER_FORMAT = 2
"""1 knew no released samples and segments; such a ledger is brought to 2 when it is opened for writing."""

_BUSY_SECONDS = 30.0
_CACHE_KIB = 64 << 10  # used only as far as needed; ids are random, so a small cache thrashes at 1e6 rows
_STORAGE_CODES = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
_DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

# A sample that is stored but no longer listed in data/samples stays known (listed = 0): should the
# data list it again, it is not captured twice.
_SAMPLE_TABLES = """
CREATE TABLE samples (
    id TEXT PRIMARY KEY,
    length INTEGER NOT NULL,
    num_supervised INTEGER NOT NULL,
    split TEXT NOT NULL,
    source TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending'
        CHECK (state IN ('pending', 'in_flight', 'stored', 'failed', 'set_aside', 'released')),
    segment TEXT,
    failures INTEGER NOT NULL DEFAULT 0,
    reason TEXT,
    attempt INTEGER,
    listed INTEGER NOT NULL DEFAULT 1,
    CHECK ((state = 'stored') = (segment IS NOT NULL))
) WITHOUT ROWID;
CREATE INDEX samples_by_state ON samples (listed, state, length);
CREATE INDEX samples_by_segment ON samples (segment) WHERE segment IS NOT NULL;
CREATE TABLE segments (
    name TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    recipe TEXT NOT NULL,
    committed_at TEXT NOT NULL,
    verified_at TEXT,
    verified_boot TEXT,
    verified_mount TEXT,
    state TEXT NOT NULL DEFAULT 'present' CHECK (state IN ('present', 'set_aside', 'released'))
) WITHOUT ROWID;
"""
_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
{_SAMPLE_TABLES}
CREATE TABLE failures (
    sample TEXT NOT NULL, attempt INTEGER, reason TEXT NOT NULL, at TEXT NOT NULL
);
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY, started_at TEXT NOT NULL, ended_at TEXT, outcome TEXT, detail TEXT NOT NULL
);
CREATE TABLE stages (
    name TEXT PRIMARY KEY,
    recipe_hash TEXT NOT NULL,
    recipe TEXT NOT NULL,
    state TEXT NOT NULL,
    started_at TEXT,
    finished_at TEXT,
    detail TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE events (at TEXT NOT NULL, attempt INTEGER, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE TABLE todos (
    id TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    priority TEXT NOT NULL CHECK (priority IN ('high', 'medium', 'low')),
    status TEXT NOT NULL
        CHECK (status IN ('pending', 'in_progress', 'completed', 'blocked', 'cancelled')),
    depends_on TEXT NOT NULL,
    evidence TEXT NOT NULL,
    changed_at TEXT NOT NULL
) WITHOUT ROWID;
"""


class LedgerFile:
    """A SQLite file in WAL mode with full syncs: a transaction that returned survives a power cut.

    One object may be shared by threads; transactions take turns.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._turn = threading.RLock()

    @classmethod
    def open(cls, path: Path, create: bool = True) -> Self:
        """Open for writing.

        Args:
            create: make the file when there is none.

        Raises:
            NotReady: there is no file and ``create`` is False.
            DamageFound: the file is no ledger, or is damaged.
            FormatTooNew: a newer eyas wrote it.
            DiskFull: there is no room to create it.
        """
        if not create and not path.exists():
            raise NotReady("there is no ledger yet", where=path, hint="eyas run")
        with _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
                _create_tables(connection)
                _bring_up_to_date(connection)
            except BaseException:
                connection.close()
                raise
        return cls._checked(path, connection)

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """Open for reading only, also while another process writes.

        Raises:
            NotReady: there is no file.
            DamageFound: the file is no ledger, or is damaged.
            FormatTooNew: a newer eyas wrote it.
        """
        if not path.exists():
            raise NotReady("there is no ledger yet", where=path, hint="eyas run")
        with _translated(path):
            connection = _connect_read_only(path, "mode=ro")
            try:
                connection.execute("SELECT count(*) FROM meta").fetchone()
            except sqlite3.OperationalError:
                connection.close()
                # On a read-only filesystem SQLite cannot make the file that readers share. Without a
                # write-ahead log nobody can be writing, so the file may be read as it is.
                if path.with_name(path.name + "-wal").exists():
                    raise
                connection = _connect_read_only(path, "immutable=1")
        return cls._checked(path, connection)

    @classmethod
    def _checked(cls, path: Path, connection: sqlite3.Connection) -> Self:
        ledger = cls(path, connection)
        try:
            found = int(ledger.meta("format") or 0)
        except BaseException:
            ledger.close()
            raise
        if found > LEDGER_FORMAT:
            ledger.close()
            raise FormatTooNew(
                f"the ledger has format {found}",
                where=path,
                why=f"this eyas reads up to format {LEDGER_FORMAT}",
                hint="pip install --upgrade eyas",
            )
        if found < 1:
            ledger.close()
            raise ledger_damaged(path, "it holds no format number")
        return ledger

    def close(self) -> None:
        """Close the file; may be called again."""
        with self._turn, _translated(self.path):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that the block writes, or nothing. Nested blocks join the outer one.

        Raises:
            DiskFull, DamageFound, EyasError: from SQLite's errors; nothing of the block was written.
        """
        with self._turn, _translated(self.path):
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection for queries, with this thread's turn held."""
        with self._turn, _translated(self.path):
            yield self._connection

    def meta(self, key: str) -> str | None:
        """A value kept under ``key``; None when there is none."""
        with self.reading() as connection:
            row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Keep ``value`` under ``key``."""
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def integrity_faults(self) -> list[str]:
        """What SQLite's own check finds wrong in pages and indexes; empty when nothing."""
        try:
            with self.reading() as connection:
                lines = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)")]
        except DamageFound as error:
            return [error.why or error.what]
        return [] if lines == ["ok"] else lines


def _connect_read_only(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables == 0:
            for statement in _TABLES.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.executemany(
                "INSERT INTO meta VALUES (?, ?)",
                [("format", str(LEDGER_FORMAT)), ("created_at", utc_now_text())],
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Give a ledger of format 1 the states that it lacks: a check cannot be changed, so tables are copied."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if found is None or found[0] != "1":
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for name in ("samples", "segments"):
            connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
        for index in ("samples_by_state", "samples_by_segment"):
            connection.execute(f"DROP INDEX {index}")
        for statement in _SAMPLE_TABLES.split(";"):
            if statement.strip():
                connection.execute(statement)
        for name in ("samples", "segments"):
            connection.execute(f"INSERT INTO {name} SELECT * FROM old_{name}")
            connection.execute(f"DROP TABLE old_{name}")
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (str(LEDGER_FORMAT),))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGE_CODES or "no such table" in str(error) or "no such column" in str(error):
            raise ledger_damaged(path, str(error)) from error
        # A full disk is "disk full" to SQLite only for some of its writes; for others it is an I/O error.
        if code == sqlite3.SQLITE_FULL or (code in _STORAGE_CODES and is_full(path.parent)):
            raise DiskFull(
                "the ledger could not be written",
                where=path,
                why=str(error),
                hint="free space, then: eyas run",
            ) from error
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        why = f"{name}: {error}"
        if code == sqlite3.SQLITE_READONLY and os.statvfs(path.parent).f_flag & os.ST_RDONLY:
            why = f"EROFS: the filesystem is read-only ({name})"
        if code in _STORAGE_CODES:
            raise StorageFailed(
                "the ledger could not be read or written",
                where=path,
                why=why,
                hint="check the disk (dmesg, mount), then: eyas run",
            ) from error
        raise EyasError("the ledger could not be used", where=path, why=why) from error


def ledger_damaged(path: Path, why: str) -> DamageFound:
    """The error for a damaged ledger, with the command that mends it."""
    return DamageFound(
        "the ledger is damaged",
        where=path,
        why=why,
        hint="eyas run (sets it aside and rebuilds it from data/ and store/)",
    )
