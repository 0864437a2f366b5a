"""The whole measurement: every level on the server with the drafter and on the plain one, never at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.base.errors import ServerUnreachable, TargetError
from eyas.base.progress import Progress
from eyas.targets.bench.advice import Advice, advise
from eyas.targets.bench.level import Measured, measure
from eyas.targets.bench.prompts import BenchPrompt, share_out
from eyas.targets.bench.server import MeasuredServer
from eyas.targets.bench.stream import Answer, Asking
from eyas.targets.serving.speculation import Speculation

_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class TextsCompared:
    """Greedy texts of the two servers: answers to the same prompt that are equal, and that are not.

    Once a conversation's answers part, its later turns ask other things and are not compared.
    """

    compared: int
    equal: int
    not_compared: int
    differences: tuple[dict[str, object], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "equal": self.equal,
            "not_compared": self.not_compared,
            "differences": list(self.differences),
        }


@dataclass(frozen=True)
class BenchLevel:
    """One concurrency: with the drafter, without it, and what follows from both."""

    concurrency: int
    drafted: Measured
    plain: Measured | None = None
    texts: TextsCompared | None = None
    advice: Advice | None = None

    @property
    def speedup(self) -> float | None:
        """Tokens per second with the drafter over those without."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second if self.plain else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "drafted": self.drafted.as_dict(),
            "plain": self.plain.as_dict() if self.plain else None,
            "speedup": self.speedup,
            "texts": self.texts.as_dict() if self.texts else None,
            "advice": self.advice.as_dict() if self.advice else None,
        }


@dataclass(frozen=True)
class BenchResult:
    """Everything that was measured.

    Args:
        drafts: whether the first server serves a drafter; None when it does not tell.
    """

    url: str
    plain_url: str | None
    engine: str
    model: str
    drafts: bool | None
    max_tokens: int
    temperature: float
    num_prompts: int
    levels: tuple[BenchLevel, ...]
    speculation: Speculation | None
    average_since_start: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def acceptance_length(self) -> float | None:
        """Over all levels, each round weighing the same."""
        return self.speculation.acceptance_length if self.speculation and self.speculation.rounds else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "plain_url": self.plain_url,
            "engine": self.engine,
            "model": self.model,
            "drafts": self.drafts,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "prompts": self.num_prompts,
            "acceptance_length": self.acceptance_length,
            "average_since_start": self.average_since_start,
            "levels": [level.as_dict() for level in self.levels],
            "notes": list(self.notes),
        }


def run_bench(
    server: MeasuredServer,
    plain: MeasuredServer | None,
    prompts: Sequence[BenchPrompt],
    concurrencies: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    progress: Progress,
) -> BenchResult:
    """Measure every concurrency in turn, each with prompts of its own.

    Raises:
        UsageError: too few prompts.
        TargetError: the plain server drafts too, or serves another model.
        ServerUnreachable: an answer failed.
    """
    if plain is not None and plain.drafts:
        raise TargetError(
            "the server that is to be the plain one serves a drafter too",
            where=plain.address.url,
            hint="start it without a drafter",
        )
    shares = share_out(prompts, concurrencies)
    asked = sum(prompt.num_turns for share in shares for prompt in share)
    progress.start("ask", total=asked * (2 if plain else 1), unit="answers")
    levels = []
    for number, (concurrency, share) in enumerate(zip(concurrencies, shares, strict=True)):
        found: dict[str, Measured] = {}
        ways = [("drafted", server), *([("plain", plain)] if plain else [])]
        # they take turns in going first, so that a machine that grows slower harms neither
        for name, which in ways if number % 2 == 0 else reversed(ways):
            asking = Asking(which.model, max_tokens, temperature, seed, which.engine == "sglang")
            shown = server.called if name == "drafted" else "plain"
            found[name] = _level(which, share, concurrency, asking, progress, shown)
        levels.append(_joined(concurrency, found, server, temperature))
    speculation = None
    for level in levels:
        if level.drafted.speculation is not None:
            speculation = level.drafted.speculation + (speculation or Speculation(0, 0, ()))
    average = server.average_since_start() if speculation is None else None
    return BenchResult(
        url=server.address.url,
        plain_url=plain.address.url if plain else None,
        engine=server.engine,
        model=server.model,
        drafts=server.drafts,
        max_tokens=max_tokens,
        temperature=temperature,
        num_prompts=sum(len(share) for share in shares),
        levels=tuple(levels),
        speculation=speculation,
        average_since_start=average,
        notes=tuple(_notes(server, plain, speculation, average, temperature)),
    )


def _level(
    server: MeasuredServer,
    prompts: Sequence[BenchPrompt],
    concurrency: int,
    asking: Asking,
    progress: Progress,
    name: str,
) -> Measured:
    def told(answer: Answer) -> None:
        progress.advance(1, concurrency=concurrency, server=name)

    try:
        found = asyncio.run(measure(server, prompts, concurrency, asking, told))
    except BaseExceptionGroup as group:  # of the conversations in flight; the first says what is wrong
        raise _first(group) from None
    if not found.answers:
        raise ServerUnreachable(
            "the server took none of the prompts",
            where=server.address.url,
            why=found.warnings[0] if found.warnings else None,
        )
    return found


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _joined(
    concurrency: int, found: dict[str, Measured], server: MeasuredServer, temperature: float
) -> BenchLevel:
    drafted, plain = found["drafted"], found.get("plain")
    advice = None
    speculation = drafted.speculation
    if (
        plain is not None
        and plain.decode_seconds_per_token
        and drafted.decode_seconds_per_token
        and speculation is not None
        and speculation.rounds
        and speculation.accepted_at
        and not server.is_tree
    ):
        rates = list(speculation.unconditional_rates)
        rates += [0.0] * ((server.num_drafts or 0) - len(rates))
        advice = advise(plain.decode_seconds_per_token, drafted.decode_seconds_per_token, rates)
    texts = compare_texts(plain.texts, drafted.texts) if plain and temperature == 0 else None
    return BenchLevel(concurrency, drafted, plain, texts, advice)


def compare_texts(plain: dict[str, list[str]], drafted: dict[str, list[str]]) -> TextsCompared:
    """Compare answer by answer, up to the first difference of each conversation."""
    compared = equal = left = 0
    differences: list[dict[str, object]] = []
    for name, ones in plain.items():
        others = drafted.get(name, [])
        for turn, (one, other) in enumerate(zip(ones, others, strict=False)):
            compared += 1
            if one != other:
                pairs = enumerate(zip(one, other, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
                differences.append({"prompt": name, "turn": turn, "first_character": place})
                left += len(ones) - turn - 1
                break
            equal += 1
    return TextsCompared(compared, equal, left, tuple(differences[:_SHOWN_DIFFERENCES]))


def _notes(
    server: MeasuredServer,
    plain: MeasuredServer | None,
    speculation: Speculation | None,
    average: float | None,
    temperature: float,
) -> list[str]:
    notes = []
    if server.drafts is False:
        notes.append("the server serves no drafter: there is no acceptance length")
        if plain is None:
            notes.append("beside a server with the drafter, this one is what --plain-url names")
            return notes
        notes.append("the speed-up compares two plain servers")
    elif speculation is None and average is not None:
        notes.append(
            f"this SGLang does not count drafts of each answer (0.5.23 does); its mean since it started is "
            f"{average:.3f}"
        )
    elif speculation is None:
        notes.append("the server does not say what it accepted: no acceptance length")
    if plain is None:
        notes.append("without --plain-url there is no speed-up, no comparison of texts and no best K")
    elif temperature > 0:
        notes.append("texts are compared at temperature 0 only")
    if server.is_tree:
        notes.append("the server drafts trees: rates are by depth, and no best K is said")
    return notes
