"""One segment onto the disk and into the ledger; either all of it counts or none.

Order: name that no reader takes for finished, space allocated, header and data, fsync, rename,
fsync of the folder, one ledger transaction. After a failed step the file is abandoned and never
synced again: a second fsync on the same descriptor may report success for data that is lost.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.errors import DiskFull, EyasError, StorageFailed
from eyas.base.files import TEMPORARY_SUFFIX, fsync_folder, temporary_name
from eyas.base.storage import FULL_ERRNOS, free_text, storage_error
from eyas.base.units import format_bytes
from eyas.store.ledger import Commit, Ledger, StoredSize
from eyas.store.segment import CapturedSample, EncodedSegment, encode_segment
from eyas.store.segment_header import segment_name, segment_number
from eyas.store.writeback import start_writeback

_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_MAX_WRITE_BYTES = _WRITEBACK_BYTES = 8 << 20


@dataclass(frozen=True)
class CommittedSegment:
    """A segment that is durable and in the ledger.

    Args:
        name: its file name.
        num_bytes: length of the file.
        num_tokens: of all its samples.
        seconds: from the first byte laid out to the end of the ledger transaction.
        ids: all samples in it.
        duplicates: those that an older segment held already.
    """

    name: str
    num_bytes: int
    num_tokens: int
    seconds: float
    ids: tuple[str, ...] = field(repr=False)
    duplicates: tuple[str, ...] = ()


def commit_samples(
    folder: Path,
    ledger: Ledger,
    recipe_hash: str,
    samples: Sequence[CapturedSample],
    numbers: Iterator[int],
) -> CommittedSegment:
    """Write samples as a new segment and note it; on failure try once more in a new file.

    Args:
        numbers: for new files, each higher than any that was used: see `next_number`.

    Raises:
        DiskFull: no room, twice. ``samples`` are untouched and may be committed later.
        EyasError: another failure, twice.
    """
    started = time.monotonic()
    segment = encode_segment(samples, recipe_hash)
    sizes = [StoredSize(sample.id, len(sample.tokens), sample.num_supervised) for sample in samples]

    def try_once() -> tuple[str, Commit]:
        path = folder / segment_name(next(numbers), segment.checksum)
        write_segment(path, segment)
        try:
            return path.name, ledger.commit_segment(path.name, segment.num_bytes, recipe_hash, sizes)
        except BaseException:
            # Should the transaction have reached the disk after all, the next quick scrub finds a
            # segment without its file and returns the samples.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    try:
        name, commit = try_once()
    except (OSError, EyasError):
        try:
            name, commit = try_once()
        except OSError as error:
            raise write_error(folder, error, segment.num_bytes) from error
    return CommittedSegment(
        name=name,
        num_bytes=segment.num_bytes,
        num_tokens=segment.num_tokens,
        seconds=time.monotonic() - started,
        ids=segment.ids,
        duplicates=commit.duplicates,
    )


def next_number(folder: Path, ledger: Ledger) -> int:
    """One more than any segment had that the folder or the ledger knows, also those set aside."""
    names = [entry.name for entry in os.scandir(folder)]
    names += [segment.name for segment in ledger.segments(state=None)]
    numbers = [segment_number(_final_name(name)) or 0 for name in names]
    return max(numbers, default=0) + 1


def _final_name(name: str) -> str:
    """The name that a temporary file was meant to get; other names as they are."""
    if not (name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)):
        return name
    return name[1:].removesuffix(TEMPORARY_SUFFIX).rpartition(".")[0]


def write_segment(path: Path, segment: EncodedSegment) -> None:
    """Make a segment durable under ``path``, which must not exist.

    Raises:
        FileExistsError: there is a file under ``path``.
        OSError: the file was abandoned; at most a temporary name is left of it.
    """
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _allocate(descriptor, segment.num_bytes)
            write_all(descriptor, segment.buffers)
            _retried(lambda: os.fsync(descriptor))
        finally:
            os.close(descriptor)
        if path.exists():
            raise FileExistsError(errno.EEXIST, "a segment of this name exists", str(path))
        _retried(lambda: os.rename(temporary, path))
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    try:
        _retried(lambda: fsync_folder(path.parent))
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Reserve the space, so that a full disk says so before a byte is written."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        _retried(lambda: os.posix_fallocate(descriptor, 0, num_bytes))
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise


def write_all(descriptor: int, buffers: Sequence[bytes | memoryview]) -> None:
    """Write all bytes in order, short writes and interruptions included; the disk is started on early.

    Raises:
        OSError: a write failed; the descriptor must not be synced any more.
    """
    position = started = 0
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            try:
                written = os.write(descriptor, view[:_MAX_WRITE_BYTES])
            except InterruptedError:
                continue
            if written == 0:
                raise OSError(errno.EIO, "a write took no bytes")
            view = view[written:]
            position += written
            if position - started >= _WRITEBACK_BYTES:
                start_writeback(descriptor, started, position - started)
                started = position


def _retried(call: Callable[[], None]) -> None:
    """Call again for as long as a signal interrupts: nothing has failed then."""
    while True:
        try:
            call()
            return
        except InterruptedError:
            continue


def write_error(folder: Path, error: OSError, num_bytes: int) -> EyasError:
    """What a failed write means to the user."""
    if error.errno in FULL_ERRNOS:
        return DiskFull(
            "there is no room for a segment",
            where=folder,
            why=f"it needs {format_bytes(num_bytes)} ({num_bytes} bytes), {free_text(folder)} is free"
            f" ({error.strerror})",
            hint="free space, then: eyas run",
        )
    if error.errno == errno.EROFS:
        return storage_error(error, folder) or StorageFailed("the filesystem is read-only", where=folder)
    return StorageFailed(
        "a segment could not be written",
        where=error.filename or folder,
        why=f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}",
        hint="check the disk (dmesg, mount), then: eyas run",
    )


def sweep_temporaries(folder: Path) -> int:
    """Remove what killed writers left unfinished; returns how many. The caller holds the project lock."""
    num_removed = 0
    for path in folder.glob(f".seg-*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)
        num_removed += 1
    return num_removed
