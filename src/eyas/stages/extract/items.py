"""What both ways of capturing share: a sample to do, its states as the store takes them, its failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from eyas.stages.project import Project
from eyas.store.commit import CommittedSegment
from eyas.store.ledger import Ledger
from eyas.store.recipe import StoreRecipe
from eyas.store.segment import CapturedSample
from eyas.store.tensors import STORAGE_DTYPES, StoredTensor
from eyas.store.writer import StoreWriter

MAX_TRIES = 3
"""A sample that failed so often is set aside."""


@dataclass(frozen=True)
class Item:
    """A sample to capture."""

    id: str
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    spans: tuple[tuple[int, int], ...]

    def captured(self, aux: torch.Tensor, last: torch.Tensor, recipe: StoreRecipe) -> CapturedSample:
        """The sample with checked states: ``aux`` [T, A, H], ``last`` [rows, H], in the store's dtype."""
        return CapturedSample(self.id, self.tokens, self.spans, stored(aux, recipe), stored(last, recipe))


def stored(states: torch.Tensor, recipe: StoreRecipe) -> StoredTensor:
    """A tensor as the store holds it, without a copy."""
    name = recipe.store_dtype
    bits = states.view(torch.uint16) if name == "BF16" else states
    return StoredTensor(name, bits.numpy().astype(STORAGE_DTYPES[name], copy=False))


def store_writer(
    project: Project,
    ledger: Ledger,
    recipe: StoreRecipe,
    on_commit: Callable[[CommittedSegment], None] | None = None,
) -> StoreWriter:
    """The writer of a project's store, as its configuration sizes segments."""
    return StoreWriter(
        project.layout.segments,
        ledger,
        recipe.hash,
        project.config.store.segment_mib << 20,
        project.config.store.segment_seconds,
        on_commit,
    )


def ledger_failure(ledger: Ledger, sample: str, reason: str, attempt: int, limit: int = MAX_TRIES) -> None:
    """Count a sample's failure unless it is stored or set aside meanwhile."""
    if ledger.state_of(sample) not in ("stored", "set_aside"):
        ledger.fail_sample(sample, reason, attempt, limit)
