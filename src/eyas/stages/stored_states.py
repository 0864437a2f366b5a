"""Stored samples as the drafter takes them: views into mapped segments, no copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from eyas.drafter.batch import TrainingSample
from eyas.store.entry import SampleEntry
from eyas.store.reader import StoreReader
from eyas.store.samples import last_rows
from eyas.store.tensors import StoredTensor


def to_torch(stored: StoredTensor) -> torch.Tensor:
    """The same bytes as a torch tensor; read-only in fact, since a segment is mapped read-only."""
    tensor = torch.from_numpy(stored.array)
    return tensor.view(torch.bfloat16) if stored.dtype == "BF16" else tensor


def _hear_of_it_once() -> None:
    """torch says once in a process that tensors of read-only arrays must not be written to. It is said here,
    where nobody listens: filters of warnings are shared among threads, and one of them reads samples."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


_hear_of_it_once()


class StoredSamples:
    """Training samples from the store, each read when it is asked for.

    Args:
        reader: of the store.
        entries: the samples that belong here (one split).
    """

    def __init__(self, reader: StoreReader, entries: Iterable[SampleEntry]) -> None:
        self._reader = reader
        self._checked: set[str] = set()
        here = [entry for entry in entries if entry.id in reader]
        self._lengths = {entry.id: entry.length for entry in here}
        self._supervised = {entry.id: entry.num_supervised for entry in here}

    def lengths(self) -> Mapping[str, int]:
        """Tokens of every sample by its id."""
        return self._lengths

    def supervised(self) -> Mapping[str, int]:
        """Tokens within spans of every sample by its id."""
        return self._supervised

    def load(self, ids: Sequence[str]) -> list[TrainingSample]:
        """These samples, in this order, hashed when first read. Raises SegmentDamaged."""
        return [self._sample(sample) for sample in ids]

    def _sample(self, sample: str) -> TrainingSample:
        # what a later epoch reads was whole when this process read it first
        captured = self._reader.sample(sample, check=sample not in self._checked)
        self._checked.add(sample)
        return TrainingSample(
            id=captured.id,
            tokens=captured.tokens,
            spans=captured.spans,
            aux=to_torch(captured.aux),
            last=to_torch(captured.last),
            last_rows=last_rows(captured.spans, len(captured.tokens)),
        )
