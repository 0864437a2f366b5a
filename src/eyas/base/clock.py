"""Time and the identity of this boot."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol


def utc_now_text() -> str:
    """Now, as ``2026-11-29T21:37:05.123Z``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_since(at: object, now: datetime | None = None) -> float | None:
    """Seconds from a time as `utc_now_text` writes it until now; None when it is no time."""
    then = parse_time(at)
    if then is None:
        return None
    return max(0.0, ((now or datetime.now(UTC)) - then).total_seconds())


def parse_time(at: object) -> datetime | None:
    """A time as `utc_now_text` writes it; None when it is none."""
    try:
        then = datetime.fromisoformat(str(at).replace("Z", "+00:00"))
    except ValueError:
        return None
    return then if then.tzinfo is not None else None


def boot_id() -> str:
    """An identity that changes with every boot of the machine; ``unknown`` where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Clock(Protocol):
    """Time that passes; tests let it pass at once."""

    def now(self) -> float:
        """Seconds from some fixed point; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Come back after ``seconds``."""


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
