"""Whether the disk keeps up with the capture."""

from __future__ import annotations

from eyas.base.progress import Progress
from eyas.base.units import format_bytes, format_seconds

MEASURED_FROM_BYTES = 256 << 20
"""Below it the disk's speed does not matter, and is not measured."""

_SURE_AFTER_SECONDS = 5.0


class Pace:
    """Compares the bytes that captures make with those that the disk takes; says once when it is too slow.

    Args:
        disk: bytes per second that were measured; None when they were not.
        num_bytes: that the run will write.
    """

    def __init__(self, disk: float | None, num_bytes: int, progress: Progress) -> None:
        self._disk, self._num_bytes, self._progress = disk, num_bytes, progress
        self._seconds, self._made = 0.0, 0
        self._told = disk is None

    def note(self, seconds: float, num_bytes: int) -> None:
        """Captures took so long and made so much, the wait for the disk left out."""
        self._seconds += seconds
        self._made += num_bytes
        if self._told or self._disk is None or self._seconds < _SURE_AFTER_SECONDS:
            return
        self._told = True
        rate = self._made / self._seconds
        if rate > self._disk:
            slow, fast = (format_seconds(self._num_bytes / speed) for speed in (self._disk, rate))
            self._progress.say(
                f"the disk is too slow for this run: captures make {format_bytes(rate)}/s, it took "
                f"{format_bytes(self._disk)}/s; all of it takes {slow} instead of {fast}"
            )
