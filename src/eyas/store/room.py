"""How much may still be written, and waiting for more."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from eyas.base.errors import DiskFull
from eyas.base.files import tree_bytes
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.base.units import format_bytes, format_seconds

Result = TypeVar("Result")


@dataclass
class Room:
    """The limits of a project's disk.

    ``reserve_bytes`` stay free on the filesystem; the project folder stays below ``budget_bytes``.
    What is free by ``statvfs`` proves nothing about storage below a virtual machine: a failed write is
    handled as well (`patiently`).
    """

    root: Path
    reserve_bytes: int
    warn_bytes: int
    budget_bytes: int | None
    wait: bool
    look_again_seconds: float
    progress: Progress
    stop: StopFlag
    _warned: bool = field(default=False, init=False)
    _used: tuple[float, int] = field(default=(0.0, 0), init=False)

    def writable_bytes(self) -> int:
        """Bytes that may be written now; negative when a limit is passed already."""
        free = shutil.disk_usage(self.root).free - self.reserve_bytes
        if self.budget_bytes is None:
            return free
        return min(free, self.budget_bytes - self._project_bytes())

    def _project_bytes(self) -> int:
        """Size of the project, walked at most every few seconds."""
        at, used = self._used
        if time.monotonic() - at > 5 or not at:
            used = tree_bytes(self.root)
            self._used = (time.monotonic(), used)
        return used

    def require(self, num_bytes: int) -> None:
        """Return when ``num_bytes`` may be written.

        Raises:
            DiskFull: there is no room and nobody wants to wait.
            Stopped: a stop was asked for while waiting.
        """
        writable = self.writable_bytes()
        if writable < num_bytes:
            self._wait_for(num_bytes)
        elif not self._warned and writable < self.warn_bytes - self.reserve_bytes:
            self._warned = True
            self.progress.say(f"disk low: {format_bytes(writable)} may still be written")

    def patiently(self, action: Callable[[], Result], num_bytes: int) -> Result:
        """Do ``action``; when the disk is full, wait for room and do it again.

        Args:
            num_bytes: about what the action writes.

        Raises:
            DiskFull: there is no room and nobody wants to wait.
            Stopped: a stop was asked for while waiting.
        """
        while True:
            try:
                return action()
            except DiskFull as error:
                if not self.wait:
                    raise
                self.progress.say(f"paused: {error.what} ({error.why})")
                self._sleep()
                self._wait_for(num_bytes, quiet=True)

    def _wait_for(self, num_bytes: int, quiet: bool = False) -> None:
        said = quiet
        while (writable := self.writable_bytes()) < num_bytes:
            if not self.wait:
                raise DiskFull(
                    f"{format_bytes(num_bytes)} have to be written, {format_bytes(max(0, writable))} may be",
                    where=self.root,
                    why=f"{format_bytes(self.reserve_bytes)} stay free"
                    + (f", and the budget is {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""),
                    hint="free space or raise disk.budget, then: eyas run",
                )
            if not said:
                said = True
                self.progress.say(
                    f"paused: {format_bytes(num_bytes)} have to be written, "
                    f"{format_bytes(max(0, writable))} may be; looking again every "
                    f"{format_seconds(self.look_again_seconds)}"
                )
            self._sleep()
        if said and not quiet:
            self.progress.say("there is room again, going on")

    def _sleep(self) -> None:
        """Wait for the next look."""
        self.stop.wait(self.look_again_seconds)
        self._used = (0.0, 0)


MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
"""Kinds whose content a reboot wipes."""


def filesystem_kind(path: Path) -> str:
    """Kind of the filesystem below ``path`` or its nearest existing parent; ``unknown`` if unsure."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    number = os.stat(place).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        point = fields[4].replace("\\040", " ")
        if fields[2] == wanted and place.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind
