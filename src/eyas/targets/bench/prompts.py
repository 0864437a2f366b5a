"""Prompts to measure a server with: every form that prepare reads, none of them twice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import DataError, UsageError
from eyas.chat.conversation import ANSWER_ROLE, Conversation, Message, TokenRow
from eyas.chat.readers import SourceReader

_ANY_VOCABULARY = 2**31 - 1
"""The server's vocabulary is not known here; it refuses ids that it has not."""


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation's side that asks.

    Attributes:
        id: identity by content.
        turns: messages of each turn, as dictionaries; empty where ``tokens`` are the prompt.
        tools: offered to the assistant.
        tokens: prompt of a record that came as token ids.
    """

    id: str
    domain: str
    turns: tuple[tuple[dict[str, Any], ...], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def num_turns(self) -> int:
        """Answers that it asks for."""
        return len(self.turns) or 1

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """What a chat client sends after ``answers``."""
        sent: list[dict[str, Any]] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            sent += [*turn, Message(ANSWER_ROLE, answer).as_dict()]
        return [*sent, *self.turns[len(answers)]]


def read_prompts(paths: Sequence[Path], *, limit: int | None = None, seed: int = 0) -> list[BenchPrompt]:
    """Prompts of files in an order made of seed and content, domains taking turns; no prompt twice.

    Args:
        limit: use at most this many.

    Raises:
        DataError: a file or a record of it cannot be used, or there is nothing in them.
    """
    found: dict[str, BenchPrompt] = {}
    for path in paths:
        name = path.name.split(".")[0]
        for record in SourceReader(path, name=name, domain=None, vocab_size=_ANY_VOCABULARY):
            prompt = _prompt(record)
            if prompt is None:
                raise DataError(
                    "a prompt cannot be used",
                    where=f"{path}:{record.line}",
                    why=str(getattr(record, "detail", "nothing is asked in it")),
                    hint="mend or remove the line",
                )
            found.setdefault(prompt.id, prompt)
    if not found:
        raise DataError("there are no prompts to ask", hint="give files with --prompts")
    by_domain: dict[str, list[BenchPrompt]] = {}
    for prompt in sorted(found.values(), key=lambda p: _drawn(seed, p.id)):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    # place within its domain, as a share: any stretch of the order then has the mixture of the whole
    order = sorted(
        ((place + 0.5) / len(prompts), domain, place)
        for domain, prompts in by_domain.items()
        for place in range(len(prompts))
    )
    return [by_domain[domain][place] for _, domain, place in order][:limit]


def share_out(prompts: Sequence[BenchPrompt], levels: Sequence[int]) -> list[list[BenchPrompt]]:
    """Prompts for each level of concurrency, none in two of them: a server remembers what it has read.

    A level gets prompts in proportion to the root of its concurrency, at least as many as are in flight.

    Raises:
        UsageError: there are too few prompts.
    """
    least = [max(1, level) for level in levels]
    if len(prompts) < sum(least):
        raise UsageError(
            f"{len(prompts)} prompts are too few",
            why=f"concurrencies {', '.join(map(str, levels))} need {sum(least)}, since none is asked twice",
            hint="give more prompts, or fewer or smaller values of --concurrency",
        )
    left = len(prompts) - sum(least)
    roots = [level**0.5 for level in levels]
    sizes = [low + int(left * root / sum(roots)) for low, root in zip(least, roots, strict=True)]
    sizes[-1] += len(prompts) - sum(sizes)
    shares: list[list[BenchPrompt]] = [[] for _ in levels]
    # dealt out one by one, so that each level has the mixture of the whole
    for prompt in prompts:
        open_levels = [i for i, size in enumerate(sizes) if len(shares[i]) < size]
        shares[min(open_levels, key=lambda i: (len(shares[i]) / sizes[i], i))].append(prompt)
    return shares


def _prompt(record: object) -> BenchPrompt | None:
    if isinstance(record, TokenRow) and record.spans:
        return BenchPrompt(
            record.id, record.domain, tokens=tuple(record.tokens[: record.spans[0][0]].tolist())
        )
    dialogue = record.dialogue() if isinstance(record, Conversation) else None
    if dialogue is None:
        return None
    return BenchPrompt(
        dialogue.id,
        dialogue.domain,
        turns=tuple(tuple(message.as_dict() for message in turn) for turn in dialogue.turns),
        tools=tuple(dict(tool) for tool in dialogue.tools),
    )


def _drawn(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
