"""Answers for a group of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from eyas.base.errors import TargetError
from eyas.base.stop import StopFlag
from eyas.targets.local.model import LocalTarget
from eyas.targets.local.sampling import RowSampler

_DROP_SHARE = 8
"""Rows are dropped once one in this many has finished: each time the cache is copied."""


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are drawn.

    Attributes:
        max_new_tokens: the limit of each answer, or one limit per prompt.
        end_tokens: ids that end an answer; the one that did is the answer's last token.
        temperature: 0 is greedy.
        top_p: share of the probability that is drawn from.
        seeds: one per prompt; needed with a temperature.
    """

    max_new_tokens: int | Sequence[int]
    end_tokens: Sequence[int]
    temperature: float = 0.0
    top_p: float = 1.0
    seeds: Sequence[int] = ()


@dataclass(frozen=True)
class Generated:
    """One answer: its token ids and why it ended (``length``: the limit was reached first)."""

    tokens: list[int]
    finish_reason: Literal["stop", "length"]


def generate(
    target: LocalTarget,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    stop: StopFlag | None = None,
    *,
    prefill_tokens: int = 8192,
) -> list[Generated]:
    """Answer a group of prompts together; rows leave as they finish.

    The same group gives the same bits each time. In another group an answer is the same up to the
    arithmetic's rounding.

    Args:
        prompts: token ids that end where the assistant begins; none is empty.
        stop: looked at between steps.
        prefill_tokens: positions of one pass over prompts, padding counted.

    Raises:
        TargetError: an empty prompt, an unknown token, or settings that do not fit the prompts.
        Stopped: ``stop`` was requested; nothing of the group is returned.
    """
    limits = _limits(settings, len(prompts))
    answers: list[list[int]] = [[] for _ in prompts]
    reasons: list[Literal["stop", "length"]] = ["length"] * len(prompts)
    if not prompts:
        return []
    sampler = RowSampler(settings.temperature, settings.top_p, settings.seeds)
    ends = frozenset(settings.end_tokens)
    session = target.session(len(prompts))
    if stop is not None:
        stop.check()
    logits = session.prefill(prompts, budget_tokens=prefill_tokens)
    rows = list(range(len(prompts)))  # which prompt each row of the session belongs to
    finished: set[int] = set()
    while True:
        chosen = sampler.draw(logits, rows)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row in finished:
                continue
            answers[row].append(token)
            if token in ends:
                reasons[row] = "stop"
                finished.add(row)
            elif len(answers[row]) >= limits[row]:
                finished.add(row)
        alive = [place for place, row in enumerate(rows) if row not in finished]
        if not alive:
            break
        if (len(rows) - len(alive)) * _DROP_SHARE >= len(rows):
            kept = torch.tensor(alive)
            session.keep(kept)
            rows = [rows[place] for place in alive]
            chosen = chosen[kept.to(chosen.device)]
        if stop is not None:
            stop.check()
        logits = session.forward(chosen[:, None]).logits
    return [Generated(tokens, reason) for tokens, reason in zip(answers, reasons, strict=True)]


def _limits(settings: SamplingSettings, num_prompts: int) -> list[int]:
    given = settings.max_new_tokens
    limits = [given] * num_prompts if isinstance(given, int) else list(given)
    if len(limits) != num_prompts or any(limit < 1 for limit in limits):
        raise TargetError(
            "max_new_tokens must be positive, one limit or one per prompt",
            why=f"{len(limits)} limits for {num_prompts} prompts",
        )
    if settings.temperature < 0 or not 0 < settings.top_p <= 1:
        raise TargetError(
            "temperature must not be negative and top_p must be in (0, 1]",
            why=f"temperature {settings.temperature}, top_p {settings.top_p}",
        )
    if settings.temperature > 0 and len(settings.seeds) != num_prompts:
        raise TargetError(
            "sampling needs a seed for each prompt", why=f"{len(settings.seeds)} for {num_prompts}"
        )
    return limits
