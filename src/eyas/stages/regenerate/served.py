"""Answers by plain servers, in the order in which they are finished."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.regenerate.answers import Answer
from eyas.stages.regenerate.asks import Ask
from eyas.stages.served_target import answering_target
from eyas.targets.server.answering import Question
from eyas.targets.server.target import Failed, ServedAnswers
from eyas.targets.server.wire import Sampling

MAX_TRIES = 3
"""A prompt that failed so often ends its conversation."""
_DURABLE_SECONDS = 30.0
"""Finished answers wait no longer than this to become a part."""


class ServerAnswers:
    """Opens the servers when they are first needed.

    Args:
        end_tokens: ids that end an answer.

    Attributes:
        failed: prompts that got no answer in `MAX_TRIES` tries, by `Ask.key`, with the reason's code.
    """

    def __init__(self, project: Project, context: RunContext, end_tokens: Sequence[int]) -> None:
        self._project, self._context = project, context
        self._end_tokens = tuple(end_tokens)
        self._stack = ExitStack()
        self._servers: ServedAnswers | None = None
        self.failed: dict[tuple[str, int, str], str] = {}

    @property
    def faults(self) -> dict[str, int]:
        """Everything that went wrong by code."""
        return self._servers.faults if self._servers is not None else {}

    def answer(self, groups: Sequence[Sequence[Ask]]) -> Iterator[list[Answer]]:
        """Finished answers, as many at a time as a group has, or those of half a minute.

        Raises:
            ServerUnreachable, TargetError: no server can be had.
            Stopped: a signal came; what was finished has been given before.
        """
        left = {":".join(map(str, ask.key)): ask for asks in groups for ask in asks}
        if not left:
            return
        servers = self._open(min(left.values(), key=lambda ask: len(ask.tokens)).tokens)
        size = self._project.config.regenerate.batch_size
        for _ in range(MAX_TRIES):
            ready: list[Answer] = []
            since = time.monotonic()
            for question, found in servers.stream(self._questions(left), self._context.stop):
                if isinstance(found, Failed):
                    self.failed[left[question.key].key] = found.code
                    continue
                ask = left.pop(question.key)
                self.failed.pop(ask.key, None)
                ready.append(ask.answered(found.tokens, found.finish_reason))
                if len(ready) >= size or time.monotonic() - since > _DURABLE_SECONDS:
                    yield ready
                    ready, since = [], time.monotonic()
            if ready:
                yield ready
            self._context.stop.check()
            if not left:
                return

    def close(self) -> None:
        """Leave or end the servers."""
        self._stack.close()

    def _open(self, probe: Sequence[int]) -> ServedAnswers:
        if self._servers is None:
            target = answering_target(self._project, self._context, probe)
            self._servers = self._stack.enter_context(target)
        return self._servers

    def _questions(self, asks: dict[str, Ask]) -> list[Question]:
        settings = self._project.config.regenerate
        return [
            Question(
                key,
                ask.tokens,
                Sampling(
                    max_new_tokens=ask.limit,
                    end_tokens=self._end_tokens,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    seed=ask.seed(settings.seed),
                ),
            )
            for key, ask in asks.items()
        ]
