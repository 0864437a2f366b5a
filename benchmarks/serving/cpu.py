"""CPU seconds of a server; steadier than the clock beside other work."""

from __future__ import annotations

from typing import Self

import psutil


class CpuWatch:
    """CPU seconds that a server's processes took within this context.

    Args:
        pid: its first process.

    Attributes:
        seconds: filled when the context ends.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self.seconds = pid, 0.0

    def __enter__(self) -> Self:
        self._before = self._taken()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._taken() - self._before

    def _taken(self) -> float:
        root = psutil.Process(self._pid)
        return sum(sum(one.cpu_times()[:2]) for one in [root, *root.children(recursive=True)])
