"""The step of eyas: the same pieces that its trainer calls, with the packing of the batch."""

from __future__ import annotations

import torch
from benchmarks.training.case import Case, make_parts
from benchmarks.training.contestant import Optimizer

import eyas
from eyas.base.memory import keep_freed_memory
from eyas.drafter.batch import TrainingSample
from eyas.drafter.model import EagleDrafter
from eyas.drafter.passes import BatchPasses
from eyas.drafter.rows import last_state_rows
from eyas.drafter.settings import TrainSettings
from eyas.drafter.teacher import Teacher
from eyas.drafter.vocabulary import DraftVocabulary


class Contestant:
    version = eyas.__version__
    shifted = False
    objective = "soft_ce"

    def __init__(self, case: Case) -> None:
        keep_freed_memory()
        parts = make_parts(case)
        settings = TrainSettings(
            steps=case.steps, gamma=case.gamma, clip=case.clip, lr=case.lr, dtype=case.dtype
        )
        drafter = EagleDrafter(case.shape(), parts.embedding.to(settings.compute_dtype()))
        drafter.load_state_dict(parts.weights)
        vocabulary = DraftVocabulary(parts.draft_ids.numpy(), case.vocab)
        teacher = Teacher(parts.head, vocabulary, device=torch.device("cpu"), dtype=settings.compute_dtype())
        spans = ((case.start, case.length),)
        rows = last_state_rows(spans, case.length)
        sample = TrainingSample(
            "sample", parts.tokens.numpy(), spans, parts.aux, parts.last[torch.from_numpy(rows)], rows
        )
        self._source = _One(sample)
        self._passes = BatchPasses(drafter, teacher, settings)
        self._optimizer = Optimizer(case, drafter.parameters())

    def step(self) -> list[float]:
        batch = self._passes.prepare(self._source, ["sample"])
        assert batch is not None
        _, sums = self._passes.train(batch, batch.num_supervised)
        self._optimizer.step()
        return sums


class _One:
    def __init__(self, sample: TrainingSample) -> None:
        self._sample = sample

    def lengths(self) -> dict[str, int]:
        return {self._sample.id: len(self._sample.tokens)}

    def supervised(self) -> dict[str, int]:
        return {self._sample.id: sum(end - start for start, end in self._sample.spans)}

    def load(self, ids: object) -> list[TrainingSample]:
        return [self._sample]
