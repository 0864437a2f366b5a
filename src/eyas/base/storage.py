"""What a failed read or write means to the user: full, read-only, or broken storage."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eyas.base.errors import DiskFull, EyasError, StorageFailed
from eyas.base.units import format_bytes

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_FULL_HINT = "free space, then: eyas run"
_FAILED_HINT = "check the disk (dmesg, mount), then: eyas run"
_OS_ERROR_MARK = "os error "  # how libraries written in Rust end the text of a system error


def error_number(error: BaseException) -> int | None:
    """The errno of a system error, also of one that safetensors has wrapped; None for other errors."""
    if isinstance(error, OSError):
        return error.errno
    if type(error).__module__.partition(".")[0] not in ("safetensors", "safetensors_rust"):
        return None
    digits = str(error).rpartition(_OS_ERROR_MARK)[2].partition(")")[0]
    return int(digits) if _OS_ERROR_MARK in str(error) and digits.isdigit() else None


def storage_error(error: BaseException, where: Path) -> EyasError | None:
    """The user's error for a system error of reading or writing; None when it is no such thing.

    Args:
        where: the folder that was at work; the error's own path counts more.
    """
    number = error_number(error)
    if number is None:
        return None
    path = getattr(error, "filename", None) or where
    text = f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
    if number in FULL_ERRNOS:
        return DiskFull(
            "there is no room for what has to be written",
            where=path,
            why=f"{text}; {free_text(where)} is free",
            hint=_FULL_HINT,
        )
    if number == errno.EROFS:
        return StorageFailed(
            "the filesystem is read-only",
            where=path,
            why=f"{text}; a filesystem turns read-only after errors of its disk, or was mounted so",
            hint="dmesg says why; mount it for writing again, then: eyas run",
        )
    return StorageFailed("a file could not be read or written", where=path, why=text, hint=_FAILED_HINT)


def is_full(folder: Path) -> bool:
    """Whether the filesystem below ``folder`` reports no free block or no free inode."""
    with suppress(OSError):
        status = os.statvfs(folder)
        return status.f_bavail == 0 or (status.f_files > 0 and status.f_favail == 0)
    return False


def free_text(folder: Path) -> str:
    """Free bytes of a filesystem as text."""
    try:
        free = format_bytes(shutil.disk_usage(folder).free)
        inodes = os.statvfs(folder)
    except OSError:
        return "an unknown amount"
    return f"{free} but no inode" if inodes.f_files and not inodes.f_favail else free


@contextmanager
def named_storage_errors(where: Path) -> Iterator[None]:
    """Turn system errors of the block into `DiskFull` or `StorageFailed`.

    Raises:
        DiskFull: there was no room, no quota, or a file size limit was hit.
        StorageFailed: another system error, named with its path.
    """
    try:
        yield
    except Exception as error:
        named = storage_error(error, where)
        if named is None:
            raise
        raise named from error
