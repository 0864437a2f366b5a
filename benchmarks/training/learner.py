"""Recipes of training on a project's captured samples, and how far each has come.

A learner takes samples in an order of its own and trains as its project would by default. All are measured by
the same code: the walk along held-out answers that eyas validates with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.base.files import read_json
from eyas.base.stop import StopFlag
from eyas.drafter.batch import TrainingSample
from eyas.drafter.model import EagleDrafter
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import epoch_order
from eyas.drafter.settings import TrainSettings
from eyas.drafter.shape import DrafterShape
from eyas.drafter.teacher import Teacher
from eyas.drafter.vocabulary import DraftVocabulary, load_vocabulary
from eyas.stages.project import Project
from eyas.stages.records import checkpoint_folders
from eyas.stages.stored_states import StoredSamples
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.targets.parts import TargetParts, load_parts


@dataclass(frozen=True)
class Lesson:
    """What all learners are given: a project whose training was run once.

    Attributes:
        shape: of the project's drafter; peers train it with the norms of EAGLE-3, the only ones both know.
        settings: of the project's training, in float32.
    """

    shape: DrafterShape
    settings: TrainSettings
    vocabulary: DraftVocabulary
    parts: TargetParts
    samples: StoredSamples
    held_out: StoredSamples
    epochs: int

    @classmethod
    def of(cls, folder: Path, epochs: int) -> Lesson:
        """Read a project. Raises SystemExit when it has not been trained."""
        project = Project.open(folder)
        folders = checkpoint_folders(project.layout.checkpoints)
        if not folders:
            raise SystemExit(f"{folder} has not been trained: eyas run --project {folder}")
        state = read_json(folders[-1] / "state.json")
        recorded = state["recipe"]["train"]
        known = TrainSettings.__dataclass_fields__
        settings = TrainSettings(**{key: value for key, value in recorded.items() if key in known})
        settings = replace(settings, dtype="float32", betas=(settings.betas[0], settings.betas[1]))
        with Ledger.open_read_only(project.layout.ledger) as ledger:
            reader, entries = StoreReader(project.layout.segments, ledger), list(ledger.entries())
        return cls(
            shape=DrafterShape.from_dict(state["shape"]),
            settings=settings,
            vocabulary=load_vocabulary(project.layout.vocabulary),
            parts=load_parts(project.resolved.model, "cpu", torch.float32),
            samples=StoredSamples(reader, (e for e in entries if e.split == "train")),
            held_out=StoredSamples(reader, (e for e in entries if e.split == "validation")),
            epochs=epochs,
        )

    def plain_shape(self) -> DrafterShape:
        return replace(self.shape, norms="eagle3")

    def order(self) -> Iterator[TrainingSample]:
        """Samples one by one, epoch after epoch."""
        for epoch in range(self.epochs):
            for name in epoch_order(list(self.samples.lengths()), self.settings.seed, epoch):
                yield self.samples.load([name])[0]

    def teacher(self) -> Teacher:
        return Teacher(self.parts.head, self.vocabulary, device=torch.device("cpu"), dtype=torch.float32)


class Learner(Protocol):
    """One recipe.

    Attributes:
        shape: of the weights that it trains.
    """

    shape: DrafterShape

    def __init__(self, lesson: Lesson) -> None: ...

    def learn(self) -> int:
        """One optimizer step; tokens of it, 0 when the recipe has ended."""

    def weights(self) -> dict[str, Tensor]:
        """By the names of engines' checkpoints."""


def acceptance_length(lesson: Lesson, shape: DrafterShape, weights: dict[str, Tensor]) -> float:
    """Of the walk along the held-out answers, as training validates."""
    drafter = EagleDrafter(shape, lesson.parts.embedding)
    drafter.load_state_dict(weights)
    totals = BatchPasses(drafter, lesson.teacher(), lesson.settings).validate(lesson.held_out, StopFlag())
    assert totals is not None
    return float(totals.summary()["walk_tau"])


def full_rows(sample: TrainingSample) -> tuple[Tensor, Tensor]:
    """Last states of all rows ``[L, T]``, zero where none is kept, and the rows of the first draft ``[L]``.

    The loss of row t of step j looks at ``h[t+1+j]``, which is kept wherever the row is supervised.
    """
    length = len(sample.tokens)
    last = torch.zeros(length, sample.last.shape[1])
    last[torch.from_numpy(sample.last_rows)] = sample.last.float()
    supervised = torch.zeros(length, dtype=torch.bool)
    for start, end in sample.spans:
        supervised[max(start - 1, 0) : max(min(end, length) - 2, 0)] = True
    return last, supervised
