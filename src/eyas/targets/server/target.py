"""The target behind servers as the stages use it: it blocks, checks, and keeps dumps until the commit."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import torch

from eyas.base.errors import TargetError
from eyas.base.stop import StopFlag
from eyas.config.target_facts import TargetFacts
from eyas.targets.capture import CapturedStates
from eyas.targets.server.answering import Answered, Answering, Question
from eyas.targets.server.capturing import Canary, CaptureRules, Capturing, Prompt, Taken
from eyas.targets.server.heads import Heads
from eyas.targets.server.loop import LoopThread
from eyas.targets.server.names import DumpNames, project_tag
from eyas.targets.server.pool import Outcome, Pool
from eyas.targets.server.replica import Job, Keeper
from eyas.targets.server.settings import ClientSettings

P = TypeVar("P")

_TRIES = 3


@dataclass(frozen=True)
class Failed:
    """A sample or prompt that failed by itself: the server was proven sound afterwards.

    Args:
        key: of the sample or prompt.
        code: a key of `eyas.targets.server.faults.FAULTS`.
        why: what was seen.
        final: more tries are not worth it.
    """

    key: str
    code: str
    why: str
    final: bool


class ServedTarget:
    """States from servers that are set up for extraction; see `CaptureTarget`.

    Args:
        canary: the prompt that proves each server.
        heads: the target's own norm and head.
        model: the target's folder.
        longest: tokens of the longest sample.
        root: of the project, whose name the dumps carry.
        say: takes one line for a person.
    """

    any_layer = False

    def __init__(
        self,
        keeper: Keeper,
        rules: CaptureRules,
        canary: Canary,
        heads: Heads,
        model: Path,
        settings: ClientSettings,
        longest: int,
        root: Path,
        say: Callable[[str], None],
    ) -> None:
        self.facts: TargetFacts = rules.facts
        self._rules, self._canary, self._say = rules, canary, say
        names = DumpNames(project_tag(root))
        self._work = Capturing(rules, heads, canary, names, settings, model, longest)
        self._outcomes: queue.Queue[Outcome[Prompt, Taken] | None] = queue.Queue()
        self._held: dict[str, Taken] = {}
        self._sent: Callable[[str], None] = lambda sample: None
        self._loop = LoopThread()
        budget, emit = settings.tokens_in_flight, self._outcomes.put
        build = partial(Pool[Prompt, Taken], keeper, self._work, settings, budget, emit, say)
        self._pool = self._loop.wait(_make(partial(build, sent=self._note_sent)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, stop: StopFlag | None = None) -> None:
        """Prove the servers with the canary; returns when one is ready.

        Raises:
            ServerUnreachable: none answers.
            TargetError: none gives what the target would.
            Stopped: a signal came.
        """
        self._loop.wait(self._pool.start(), stop)
        engines = ", ".join(sorted(set(self.engines.values())))
        self._say(f"canary: {engines} gives valid states; {self._canary.proves}")

    @property
    def engines(self) -> dict[str, str]:
        """Engine and version of each proven server, by URL."""
        return dict(self._work.engines)

    @property
    def faults(self) -> dict[str, int]:
        """Everything that went wrong so far by code, whoever was to blame; and late dumps, which counted."""
        return dict(sorted((self._pool.faults + self._work.counts).items()))

    def stream(
        self,
        prompts: Iterable[Prompt],
        stop: StopFlag | None = None,
        sent: Callable[[str], None] | None = None,
    ) -> Iterator[Taken | Failed]:
        """Capture many prompts; each comes once, as it is finished, in any order.

        Servers wait while the caller does not ask on. Ends early when a stop is asked for. The dump of a
        taken prompt stays until `release`.

        Args:
            sent: told of each prompt as it is sent, in another thread.

        Raises:
            ServerUnreachable, TargetError: all servers are lost.
            DiskFull: the dump folder stays full.
        """
        jobs = [Job(prompt.sample, len(prompt.tokens), prompt) for prompt in prompts]
        self._sent = sent or (lambda sample: None)
        for outcome in self._loop.items(self._pool.run(jobs), self._outcomes, stop):
            if outcome.result is not None:
                self._held[outcome.job.key] = outcome.result
                yield outcome.result
            elif outcome.fault is not None:
                fault = outcome.fault
                yield Failed(outcome.job.key, fault.code, fault.why, fault.final)
            self._loop.call(self._pool.release, outcome)

    def _note_sent(self, sample: str) -> None:
        self._sent(sample)

    def release(self, samples: Iterable[str]) -> None:
        """Remove the dumps of samples that are committed; called from any thread."""
        for sample in samples:
            taken = self._held.pop(sample, None)
            if taken is not None:
                taken.remove_dump()

    def capture(
        self,
        batch: Sequence[Sequence[int]],
        aux_layers: Sequence[int],
        *,
        store_dtype: torch.dtype | None = None,
    ) -> list[CapturedStates]:
        """States of every token of a batch; see `CaptureTarget`."""
        if tuple(aux_layers) != self._rules.layers:
            raise TargetError(
                f"the servers give layers {list(self._rules.layers)}, not {list(aux_layers)}",
                hint="start them with these layers",
            )
        found: dict[str, CapturedStates] = {}
        failed: Failed | None = None
        for _ in range(_TRIES):
            left = [Prompt(f"check{i}", tokens) for i, tokens in enumerate(batch) if f"check{i}" not in found]
            for one in self.stream(left):
                if isinstance(one, Failed):
                    failed = one
                else:
                    found[one.prompt.sample] = one.states
                    self.release([one.prompt.sample])
            if len(found) == len(batch):
                wanted = store_dtype or self._rules.store_dtype
                states = (found[f"check{i}"] for i in range(len(batch)))
                return [CapturedStates(s.aux.to(wanted), s.last.to(wanted)) for s in states]
        assert failed is not None
        raise TargetError(
            "a stored sample cannot be captured again", why=f"{failed.code}: {failed.why}", hint="eyas run"
        )

    def close(self) -> None:
        """End all requests; remove our orphans and the dumps of what was not committed."""
        self._loop.wait(self._pool.close())
        self.release(list(self._held))
        self._work.sweep()
        self._work.close()
        self._loop.close()


class ServedAnswers:
    """Answers from plain servers.

    Args:
        facts: of the target.
        probe: a short prompt with which servers are proven.
        requests: prompts that one server answers at a time.
    """

    def __init__(
        self,
        keeper: Keeper,
        facts: TargetFacts,
        settings: ClientSettings,
        probe: Sequence[int],
        requests: int,
        root: Path,
        say: Callable[[str], None],
    ) -> None:
        work = Answering(facts.vocab_size, probe, DumpNames(project_tag(root)), settings)
        self._outcomes: queue.Queue[Outcome[Question, Answered] | None] = queue.Queue()
        self._loop = LoopThread()
        build = partial(Pool[Question, Answered], keeper, work, settings, requests)
        self._pool = self._loop.wait(_make(partial(build, self._outcomes.put, say)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, stop: StopFlag | None = None) -> None:
        """Prove the servers; returns when one is ready. Raises as `ServedTarget.open`."""
        self._loop.wait(self._pool.start(), stop)

    @property
    def faults(self) -> dict[str, int]:
        """Everything that went wrong so far by code."""
        return dict(sorted(self._pool.faults.items()))

    def stream(
        self, questions: Iterable[Question], stop: StopFlag | None = None
    ) -> Iterator[tuple[Question, Answered | Failed]]:
        """Answer many prompts; each comes once, as it is finished. Ends early when a stop is asked for.

        Raises:
            ServerUnreachable, TargetError: all servers are lost.
        """
        jobs = [Job(question.key, 1, question) for question in questions]
        for outcome in self._loop.items(self._pool.run(jobs), self._outcomes, stop):
            if outcome.result is not None:
                yield outcome.job.payload, outcome.result
            elif outcome.fault is not None:
                fault = outcome.fault
                yield outcome.job.payload, Failed(outcome.job.key, fault.code, fault.why, fault.final)
            self._loop.call(self._pool.release, outcome)

    def close(self) -> None:
        """End all requests; may be called again."""
        self._loop.wait(self._pool.close())
        self._loop.close()


async def _make(build: Callable[[], P]) -> P:
    """Build something in the loop that will use it."""
    return build()
