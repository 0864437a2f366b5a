"""A wish to stop, passed down to whoever loops."""

from __future__ import annotations

import time

from eyas.base.errors import Stopped

_SLICE_SECONDS = 0.2


class StopFlag:
    """Set by a signal handler, looked at between units of work.

    Args:
        outer: a wish to stop that counts here too.
    """

    def __init__(self, outer: StopFlag | None = None) -> None:
        self._number: int | None = None
        self._outer = outer

    @property
    def signal_number(self) -> int | None:
        """The signal that asked for it; None while nothing did."""
        if self._number is None and self._outer is not None:
            return self._outer.signal_number
        return self._number

    def request(self, signal_number: int) -> None:
        self._number = signal_number

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def check(self) -> None:
        """Raise Stopped when a stop was asked for; call it where all state is saved or abandoned."""
        number = self.signal_number
        if number is not None:
            raise Stopped(number)

    def wait(self, seconds: float) -> None:
        """Sleep, in slices so that a stop is heard. Raises Stopped as `check` does."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_SLICE_SECONDS, left))
            self.check()
