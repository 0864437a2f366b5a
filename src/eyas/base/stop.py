"""A wish to stop, passed down to whoever loops."""

from __future__ import annotations

from eyas.base.errors import Stopped


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
