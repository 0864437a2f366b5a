"""A wish to stop, passed down to whoever loops."""

from __future__ import annotations

import time

from eyas.base.errors import Stopped

_SLICE_SECONDS = 0.2


class StopFlag:
    """Set by a signal handler, looked at between units of work."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def request(self, signal_number: int) -> None:
        self.signal_number = signal_number

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def check(self) -> None:
        """Raise Stopped when a stop was asked for; call it where all state is saved or abandoned."""
        if self.signal_number is not None:
            raise Stopped(self.signal_number)

    def wait(self, seconds: float) -> None:
        """Sleep, in slices so that a stop is heard. Raises Stopped as `check` does."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_SLICE_SECONDS, left))
            self.check()
