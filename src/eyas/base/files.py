"""Files that are either whole or absent, also after a crash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.base.clock import utc_now_text

TEMPORARY_SUFFIX = ".tmp"
"""Names that end in this are unfinished and may be ignored or swept by whoever holds the lock."""


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no reader takes for finished."""
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write ``content`` under ``path`` so that a crash leaves the old file or the new one.

    A failed write or fsync abandons the temporary file: a second fsync on the same descriptor may
    report success for data that is lost.

    Raises:
        OSError: nothing was changed under ``path``.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically. Raises OSError as `write_atomic` does."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in ``path``. Raises OSError or json.JSONDecodeError."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def appending(path: Path) -> Iterator[Any]:
    """A text file opened for appending whose last line is whole.

    A line that a crash has torn is ended first, so that the next record does not join it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = False
    if path.exists() and path.stat().st_size > 0:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
    with open(path, "a", encoding="utf-8") as file:
        if torn:
            file.write("\n")
        yield file


def set_aside(path: Path, set_aside_folder: Path, reason: str) -> Path:
    """Move a file or folder out of the way, with the reason beside it; nothing is deleted.

    Returns:
        The new place.

    Raises:
        OSError: ``path`` was not moved.
    """
    set_aside_folder.mkdir(parents=True, exist_ok=True)
    stamp = utc_now_text().replace(":", "").replace("-", "").split(".")[0].rstrip("Z")
    place = set_aside_folder / f"{stamp}-{path.name}"
    number = 1
    while place.exists() or place.with_name(place.name + ".reason.json").exists():
        number += 1
        place = set_aside_folder / f"{stamp}-{number}-{path.name}"
    write_json(
        place.with_name(place.name + ".reason.json"),
        {"from": str(path), "reason": reason, "at": utc_now_text()},
    )
    try:
        os.rename(path, place)
    except OSError:
        shutil.move(path, place)  # another filesystem: copies, then removes the source
    fsync_folder(place.parent)
    if path.parent.exists():
        fsync_folder(path.parent)
    return place


def sweep_temporaries(folders: Iterable[Path]) -> int:
    """Remove what killed writers left unfinished in these folders; returns how many.

    The caller holds the project lock, so nobody else is writing there.
    """
    num_removed = 0
    for folder in folders:
        for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            num_removed += 1
    return num_removed


def tree_bytes(folder: Path) -> int:
    """Bytes of all regular files below ``folder``; 0 when it does not exist."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
