"""Signals of a running verb: the first asks for a clean stop, the second ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from eyas.base.stop import StopFlag


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP set ``stop`` while the block runs.

    A second signal ends the process at once; all that was committed is whole by the commit order.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            os._exit(128 + number)
        stop.request(number)

    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
