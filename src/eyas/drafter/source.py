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

    def supervised(self) -> Mapping[str, int]:
        """Tokens within spans of every sample."""

    def load(self, ids: Sequence[str]) -> list[TrainingSample]:
        """The samples with these ids, in this order."""


STEP_COST = 4.0
"""What a supervised row costs at each draft step, against a row that only lends its key and value: by the
count of multiplications, 24 to 34 H^2 (layer and head) against 7 H^2 (``fc``, keys and values)."""


def sample_costs(source: SampleSource, steps: int) -> dict[str, float]:
    """Relative work that each sample makes in training."""
    supervised = source.supervised()
    return {name: length + STEP_COST * steps * supervised[name] for name, length in source.lengths().items()}


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
