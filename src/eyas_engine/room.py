"""Whether a dump folder may take another dump."""

from __future__ import annotations

import os
import time
from pathlib import Path

_FORGET_SECONDS = 60.0
"""After this long an announced dump that never came to be no longer counts."""


class Room:
    """Counts the bytes of a dump folder: those on it and those announced and not yet there.

    Args:
        directory: the dump folder.
        limit_bytes: most bytes in it; 0: none but the filesystem's.
        full_share: refuse when dumps would pass this share of what they can hold, which is what they hold now
            and what the filesystem has free, at most ``limit_bytes``. What others keep on the disk does not
            count: it says nothing of the room that is left.
    """

    def __init__(self, directory: Path, limit_bytes: int, full_share: float) -> None:
        self._directory, self._limit_bytes, self._full_share = directory, limit_bytes, full_share
        self._announced: dict[str, tuple[int, float]] = {}

    def refuse(self, name: str, num_bytes: int) -> str | None:
        """Why there is no room for ``num_bytes``; None admits them under ``name``.

        A folder that cannot be read has no room.
        """
        try:
            present, used = self._present()
            filesystem = os.statvfs(self._directory)
        except OSError as error:
            return f"full: the dump folder cannot be read: {error}"
        now = time.monotonic()
        self._announced = {
            other: (size, since)
            for other, (size, since) in self._announced.items()
            if other not in present and now - since < _FORGET_SECONDS
        }
        coming = num_bytes + sum(size for size, _ in self._announced.values())
        capacity = used + filesystem.f_bavail * filesystem.f_frsize
        if self._limit_bytes:
            capacity = min(capacity, self._limit_bytes)
        if used + coming > self._full_share * capacity:
            return f"full: dumps hold {used} of {capacity} bytes there is room for, and {coming} are to come"
        self._announced[name] = (num_bytes, now)
        return None

    def _present(self) -> tuple[set[str], int]:
        names, total = set(), 0
        with os.scandir(self._directory) as entries:
            for entry in entries:
                stem, _, suffix = entry.name.rpartition(".")
                if suffix in ("dump", "err"):
                    names.add(stem)
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:
                    continue  # the client has just taken it
        return names, total
