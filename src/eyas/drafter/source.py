"""Where training samples come from, and batches made ready ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from eyas.drafter.batch import TrainingSample

Item = TypeVar("Item")
Ready = TypeVar("Ready")


class SampleSource(Protocol):
    """Samples by id. ``load`` is called from another thread than ``lengths``."""

    def lengths(self) -> Mapping[str, int]:
        """Tokens of every sample."""

    def load(self, ids: Sequence[str]) -> list[TrainingSample]:
        """The samples with these ids, in this order."""


def prepared_ahead(items: Sequence[Item], prepare: Callable[[Item], Ready]) -> Generator[Ready, None, None]:
    """``prepare(item)`` of each item in order, the next one being made while this one is used.

    An exception of ``prepare`` is raised when its item is asked for.
    """
    if not items:
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        waiting = pool.submit(prepare, items[0])
        for item in items[1:]:
            ready = waiting.result()
            waiting = pool.submit(prepare, item)
            yield ready
        yield waiting.result()
