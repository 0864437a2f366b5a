"""Answers by the target in this process, group by group."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

from eyas.stages.local_target import load_target
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.regenerate.answers import Answer
from eyas.stages.regenerate.asks import Ask
from eyas.targets.local.generate import SamplingSettings, generate
from eyas.targets.local.model import LocalTarget


class LocalAnswers:
    """Loads the target when it is first needed.

    Args:
        end_tokens: ids that end an answer.
    """

    def __init__(
        self, project: Project, context: RunContext, device: str, dtype: str, end_tokens: Sequence[int]
    ) -> None:
        self._project, self._context = project, context
        self._device, self._dtype, self._end_tokens = device, dtype, end_tokens
        self._target: LocalTarget | None = None
        self.failed: dict[tuple[str, int, str], str] = {}

    @property
    def faults(self) -> dict[str, int]:
        return {}

    def answer(self, groups: Sequence[Sequence[Ask]]) -> Iterator[list[Answer]]:
        """The answers of each group. Raises Stopped between groups and within."""
        for asks in groups:
            self._context.stop.check()
            if self._target is None:
                self._target = load_target(self._project, self._device, self._dtype, self._context.progress)
            yield self._group(self._target, asks)

    def close(self) -> None:
        self._target = None
        gc.collect()

    def _group(self, target: LocalTarget, asks: Sequence[Ask]) -> list[Answer]:
        settings = self._project.config.regenerate
        generated = generate(
            target,
            [ask.tokens for ask in asks],
            SamplingSettings(
                max_new_tokens=[ask.limit for ask in asks],
                end_tokens=self._end_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seeds=[ask.seed(settings.seed) for ask in asks],
            ),
            self._context.stop,
        )
        return [
            ask.answered(made.tokens, made.finish_reason) for ask, made in zip(asks, generated, strict=True)
        ]
