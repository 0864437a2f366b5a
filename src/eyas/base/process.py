"""Who a process is: its id alone is used again by the system, its id and start time are not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.clock import boot_id


def process_start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def is_running(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same id."""

    pid: int
    started_ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of a process that exists now."""
        return cls(pid, process_start_ticks(pid), boot_id())

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> ProcessIdentity:
        """What `as_dict` gave. Raises KeyError, TypeError or ValueError."""
        return cls(int(table["pid"]), int(table["started_ticks"]), str(table["boot"]))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def alive(self) -> bool:
        """Whether this very process still runs on this boot."""
        return (
            self.boot == boot_id()
            and self.started_ticks != 0
            and process_start_ticks(self.pid) == self.started_ticks
            and is_running(self.pid)
        )
