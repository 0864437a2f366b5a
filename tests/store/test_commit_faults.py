"""The n-th system call fails, n = 1, 2, ... until none does: the store stays whole or says what is wrong."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.base.errors import DiskFull, EyasError
from eyas.base.layout import Layout
from eyas.store import scrub
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter
from tests.store.making import RECIPE, captured, project, same

SAMPLES = [captured(seed) for seed in range(9)]
FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]


class FailingCall:
    """Stands in for a function of ``os``; the calls whose numbers are in ``when`` fail."""

    def __init__(self, real: Callable[..., Any], when: range, error: int) -> None:
        self.real, self.when, self.error = real, when, error
        self.num_calls = self.num_fired = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.num_calls in self.when:
            self.num_fired += 1
            raise OSError(self.error, os.strerror(self.error))
        return self.real(*arguments, **options)


def write_all(layout: Layout) -> EyasError | None:
    """Write what is pending, three samples a segment; the error that ended it, if one did."""
    with Ledger.open(layout.ledger) as ledger:
        ledger.release_leases()
        left = set(ledger.lease(ledger.pending(), ledger.start_attempt()))
        writer = StoreWriter(layout.segments, ledger, RECIPE.hash)
        try:
            for number, sample in enumerate(sample for sample in SAMPLES if sample.id in left):
                writer.add(sample)
                if number % 3 == 2:
                    writer.flush()
            writer.close()
        except EyasError as error:
            with pytest.raises(EyasError):  # the samples in memory are given up, and that is said
                writer.close()
            return error
    return None


def assert_committed_are_whole(layout: Layout) -> int:
    """Every stored sample has its bits; returns how many there are."""
    with Ledger.open_read_only(layout.ledger) as ledger:
        reader = StoreReader(layout.segments, ledger)
        stored = reader.ids()
        by_id = {sample.id: sample for sample in SAMPLES}
        assert all(same(by_id[sample], reader.sample(sample, check=True)) for sample in stored)
        assert len(stored) == ledger.counts()["stored"].samples
        assert len(ledger.segments()) == len(list(layout.segments.glob("seg-*")))
    assert [fault for fault in scrub.deep(layout) if fault.kind != "temporary"] == []
    return len(stored)


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "posix_fallocate", "open", "close"])
@pytest.mark.parametrize("error", [*FULL, errno.EIO, errno.EROFS])
def test_one_failed_call_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    num_faults = 0
    for number in range(1, 1000):
        layout = project(tmp_path / f"{number}", SAMPLES)
        failing = FailingCall(getattr(os, call), range(number, number + 1), error)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            found = write_all(layout)
        assert found is None
        assert assert_committed_are_whole(layout) == 9
        num_faults += failing.num_fired
        if not failing.num_fired:
            break
    assert num_faults == number - 1 >= 3


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "posix_fallocate"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_lasting_failure_stops_cleanly_and_a_later_run_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    for number in range(1, 1000):
        layout = project(tmp_path / f"{number}", SAMPLES)
        failing = FailingCall(getattr(os, call), range(number, 10**9), error)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            found = write_all(layout)
        num_stored = assert_committed_are_whole(layout)
        if not failing.num_fired:
            assert found is None
            assert num_stored == 9
            break
        assert found is not None
        assert num_stored < 9
        if error == errno.ENOSPC:
            assert isinstance(found, DiskFull)
            assert "bytes" in (found.why or "")
            assert "is free" in (found.why or "")
            assert found.hint == "free space, then: eyas run"
        else:
            assert not isinstance(found, DiskFull)
            assert "EIO" in (found.why or "")
        assert write_all(layout) is None
        assert assert_committed_are_whole(layout) == 9
    assert number > 3


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "posix_fallocate"])
def test_signals_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    layout = project(tmp_path, SAMPLES)
    failing = FailingCall(getattr(os, call), range(1, 1000, 2), errno.EINTR)
    monkeypatch.setattr(os, call, failing)
    assert write_all(layout) is None
    monkeypatch.undo()
    assert failing.num_fired >= 3
    assert assert_committed_are_whole(layout) == 9
    with Ledger.open_read_only(layout.ledger) as ledger:
        assert [record.name[:12] for record in ledger.segments()] == [f"seg-0000000{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    layout = project(tmp_path, SAMPLES[:1] if most == 1 else SAMPLES)
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:most]))
    assert write_all(layout) is None
    monkeypatch.undo()
    assert assert_committed_are_whole(layout) == (1 if most == 1 else 9)


def test_a_write_that_takes_nothing_does_not_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = project(tmp_path, SAMPLES)
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    found = write_all(layout)
    assert found is not None
    assert "took no bytes" in (found.why or "")


def test_a_filesystem_without_allocation_is_written_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = project(tmp_path, SAMPLES)
    failing = FailingCall(os.posix_fallocate, range(1, 10**9), errno.EOPNOTSUPP)
    monkeypatch.setattr(os, "posix_fallocate", failing)
    assert write_all(layout) is None
    monkeypatch.undo()
    assert failing.num_fired == 3  # one a segment: no file was abandoned
    assert assert_committed_are_whole(layout) == 9


def test_what_cannot_be_removed_is_swept_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = project(tmp_path, SAMPLES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FailingCall(os.write, range(1, 2), errno.ENOSPC))
        patch.setattr(os, "unlink", FailingCall(os.unlink, range(1, 10**9), errno.EIO))
        assert write_all(layout) is None
    assert [fault.kind for fault in scrub.quick(layout)] == ["temporary"]
    assert assert_committed_are_whole(layout) == 9
    assert write_all(layout) is None
    assert scrub.quick(layout) == []


def test_a_failed_descriptor_is_never_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does: the first fsync fails, and later ones on the same file report success."""
    layout = project(tmp_path, SAMPLES)
    real_open, real_fsync = os.open, os.fsync
    opened: dict[int, str] = {}
    synced: list[str] = []

    def noting_open(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = real_open(path, *arguments, **options)
        opened[descriptor] = str(path)
        return descriptor

    def failing_fsync(descriptor: int) -> None:
        name = opened[descriptor]
        synced.append(name)
        if name.endswith(".tmp") and len(synced) == 1:
            raise OSError(errno.EIO, "lost")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "open", noting_open)
    monkeypatch.setattr(os, "fsync", failing_fsync)
    assert write_all(layout) is None
    monkeypatch.undo()
    files = [name for name in synced if name.endswith(".tmp")]
    assert len(files) == len(set(files)) == 4
    assert assert_committed_are_whole(layout) == 9


class FailingConnection:
    """A SQLite connection whose n-th statement, or its commit, fails."""

    def __init__(self, real: sqlite3.Connection, when: int, code: int) -> None:
        self.real, self.when, self.code = real, when, code
        self.num_calls = self.num_fired = 0

    def execute(self, statement: str, *arguments: Any) -> Any:
        if statement != "ROLLBACK":
            self.num_calls += 1
            if self.num_calls == self.when:
                self.num_fired += 1
                error = sqlite3.OperationalError("injected")
                error.sqlite_errorcode = self.code
                raise error
        return self.real.execute(statement, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR])
def test_a_failed_ledger_transaction_costs_nothing(tmp_path: Path, code: int) -> None:
    for number in range(1, 1000):
        layout = project(tmp_path / f"{number}", SAMPLES)
        with Ledger.open(layout.ledger) as ledger:
            with StoreWriter(layout.segments, ledger, RECIPE.hash) as writer:
                for sample in SAMPLES[:5]:
                    writer.add(sample)
                failing = FailingConnection(ledger._connection, number, code)
                ledger._connection = failing  # type: ignore[assignment]
            ledger._connection = failing.real
        assert assert_committed_are_whole(layout) == 5
        if not failing.num_fired:
            break
    assert number > 5


def test_a_lasting_ledger_failure_leaves_nothing_that_counts(tmp_path: Path) -> None:
    layout = project(tmp_path, SAMPLES)
    with Ledger.open(layout.ledger) as ledger:
        writer = StoreWriter(layout.segments, ledger, RECIPE.hash)
        with ledger.transaction() as connection:
            connection.execute(
                "CREATE TRIGGER refuse BEFORE INSERT ON segments BEGIN SELECT raise(ABORT, 'no'); END"
            )
        writer.add(SAMPLES[0])
        with pytest.raises(EyasError, match="ledger"):
            writer.flush()
        assert list(layout.segments.iterdir()) == []
        assert writer.num_unwritten == 1
        with ledger.transaction() as connection:
            connection.execute("DROP TRIGGER refuse")
        writer.close()
    assert assert_committed_are_whole(layout) == 1


def test_a_full_disk_and_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run pauses: the same writer goes on when there is room, with the samples it still has."""
    layout = project(tmp_path, SAMPLES)
    with Ledger.open(layout.ledger) as ledger:
        writer = StoreWriter(layout.segments, ledger, RECIPE.hash, segment_bytes=SAMPLES[0].nbytes)
        writer.add(SAMPLES[0])
        writer.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", FailingCall(os.posix_fallocate, range(1, 99), errno.ENOSPC))
            num_told = 0
            for sample in SAMPLES[1:4]:
                while True:
                    try:
                        writer.add(sample)
                        break
                    except DiskFull:
                        num_told += 1
                        assert num_told < 50
                        if num_told == 3:
                            patch.undo()
        writer.close()
    assert num_told >= 1
    assert assert_committed_are_whole(layout) == 4


def test_the_order_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = project(tmp_path, SAMPLES)
    steps: list[str] = []
    names: dict[int, str] = {}
    real_open = os.open

    def noting_open(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = real_open(path, *arguments, **options)
        names[descriptor] = "folder" if Path(path) == layout.segments else "temporary"
        return descriptor

    def noting(call: str) -> None:
        real = getattr(os, call)

        def wrapper(first: Any, *arguments: Any) -> Any:
            steps.append(f"{call} {names[first]}" if isinstance(first, int) else call)
            return real(first, *arguments)

        monkeypatch.setattr(os, call, wrapper)

    with Ledger.open(layout.ledger) as ledger:
        real_commit = ledger.commit_segment

        def noting_commit(*arguments: Any) -> Any:
            steps.append("ledger")
            return real_commit(*arguments)

        monkeypatch.setattr(os, "open", noting_open)
        monkeypatch.setattr(ledger, "commit_segment", noting_commit)
        for call in ("posix_fallocate", "write", "fsync", "rename"):
            noting(call)
        with StoreWriter(layout.segments, ledger, RECIPE.hash) as writer:
            writer.add(SAMPLES[0])
        monkeypatch.undo()
    assert steps == [
        "posix_fallocate temporary",
        "write temporary",
        "fsync temporary",
        "rename",
        "fsync folder",
        "ledger",
    ]
