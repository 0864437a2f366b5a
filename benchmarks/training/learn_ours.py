"""The recipe of eyas: fitted start, packed batches, the project's own settings."""

from __future__ import annotations

import torch
from benchmarks.training.learner import Lesson
from torch import Tensor

from eyas.drafter.model import EagleDrafter
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import TrainingPlan
from eyas.drafter.stepping import make_optimizer
from eyas.drafter.warmstart import give_first_weights


class Learner:
    def __init__(self, lesson: Lesson) -> None:
        settings = lesson.settings
        self.shape, self._settings, self._samples = lesson.shape, settings, lesson.samples
        self._drafter = EagleDrafter(lesson.shape, lesson.parts.embedding)
        give_first_weights(
            self._drafter,
            settings,
            lesson.vocabulary,
            head=lesson.parts.head,
            norm_weight=lesson.parts.norm_weight,
            samples=lesson.samples,
        )
        self._passes = BatchPasses(self._drafter, lesson.teacher(), settings)
        self._plan = TrainingPlan(
            dict(lesson.samples.lengths()),
            epochs=settings.epochs,
            batch_tokens=settings.batch_tokens,
            accumulate=settings.accumulate,
            seed=settings.seed,
        )
        self._optimizer = make_optimizer(self._drafter, settings)
        self._done = 0

    def learn(self) -> int:
        if self._done == len(self._plan.steps):
            return 0
        settings, planned = self._settings, self._plan.steps[self._done]
        batches = [batch for ids in planned.batches if (batch := self._passes.prepare(self._samples, ids))]
        rows = [sum(batch.num_supervised[j] for batch in batches) for j in range(settings.steps)]
        for batch in batches:
            self._passes.train(batch, rows)
        torch.nn.utils.clip_grad_norm_(list(self._drafter.parameters()), settings.clip)
        rate = settings.rate(self._done, len(self._plan.steps))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._done += 1
        return self._plan.step_tokens(planned)

    def weights(self) -> dict[str, Tensor]:
        return dict(self._drafter.state_dict())
