"""The processes that train one drafter together, and what they tell each other.

Numbers that decide something travel as float64 through host memory; only weights and gradients take the
devices' own way. Whatever one process decides, all decide: they see the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eyas.base.errors import WorkerLost

_LOST = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout",
    "remote process", "remote error", "aborted", "gloo/transport",
)  # fmt: skip
"""Words of the errors that collectives raise when another process is gone."""


class World:
    """This process among those that train together.

    Attributes:
        rank: its number; 0 writes what is written.
        size: how many there are; 1 needs no process group.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, *, reason_of_loss: Callable[[], Exception | None] | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self._reason_of_loss = reason_of_loss

    @property
    def first(self) -> bool:
        """Whether this process writes checkpoints and metrics."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all processes, in float64."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def highest(self, numbers: Sequence[float]) -> list[float]:
        """Maxima over all processes."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def _reduced(self, numbers: Sequence[float], how: Any) -> list[float]:
        if self.alone:
            return list(numbers)
        table = torch.tensor(list(numbers), dtype=torch.float64)
        with self.watched():
            dist.all_reduce(table, op=how)
        return [float(x) for x in table.tolist()]

    def from_first(self, value: Any) -> Any:
        """What the first process has; anything that JSON holds. Others may give None."""
        return value if self.alone else self._sent(value, 0)

    def from_all(self, value: Any) -> list[Any]:
        """What each process has, by rank; anything that JSON holds."""
        return [value] if self.alone else [self._sent(value, rank) for rank in range(self.size)]

    def _sent(self, value: Any, source: int) -> Any:
        mine = self.rank == source
        content = json.dumps(value).encode() if mine else b""
        (length,) = self.total([len(content) if mine else 0])
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if mine else None
        if data is None:
            data = torch.empty(int(length), dtype=torch.uint8)
        with self.watched():
            dist.broadcast(data, source)
        return json.loads(data.numpy().tobytes())

    def spread(self, tensor: Tensor) -> None:
        """Make a whole tensor, in place, what the first process has."""
        if self.alone:
            return
        with self.watched():
            dist.broadcast(tensor, 0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Name the loss of another process for what it is.

        Raises:
            WorkerLost: a collective failed; or the error that the other process left behind.
        """
        try:
            yield
        except RuntimeError as error:
            if self.alone or not _is_loss(error):
                raise
            told = self._reason_of_loss() if self._reason_of_loss is not None else None
            if told is not None:
                raise told from error
            raise WorkerLost(
                f"a process that trains beside this one (rank {self.rank} of {self.size}) is gone",
                why=str(error).splitlines()[0][:300],
                hint="eyas run resumes from the newest checkpoint",
            ) from error


def _is_loss(error: RuntimeError) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _LOST)
