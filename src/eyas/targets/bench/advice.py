"""The best number of drafts, from what a round costs and what it brings.

A round of K drafts costs the target's forward pass and K times a draft; plain decoding at the same
concurrency shows the first, the server with the drafter shows the sum. A chain of k < K accepts what the
first k positions of the longer one accept (Leviathan et al., 2023, has the same model with one rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A chain of ``num_drafts`` (0: no drafter): tokens a round, seconds a round, tokens per second of one
    answer. ``guessed``: longer than the measured chain, acceptance prolonged from its last positions."""

    num_drafts: int
    acceptance_length: float
    round_seconds: float
    tokens_per_second: float
    guessed: bool


@dataclass(frozen=True)
class Advice:
    """Choices by number of drafts, and the fastest of those that were measured."""

    choices: tuple[Choice, ...]
    forward_seconds: float
    draft_seconds: float

    @property
    def best(self) -> Choice:
        return max((c for c in self.choices if not c.guessed), key=lambda c: c.tokens_per_second)

    @property
    def longer(self) -> Choice | None:
        """A longer chain that may be faster still; None when none is."""
        fastest = max(self.choices, key=lambda c: c.tokens_per_second)
        return fastest if fastest.guessed else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "best_num_drafts": self.best.num_drafts,
            "worth_trying": self.longer.num_drafts if self.longer else None,
            "forward_seconds": self.forward_seconds,
            "draft_seconds": self.draft_seconds,
            "choices": [asdict(choice) for choice in self.choices],
        }


def advise(
    plain_seconds_per_token: float, drafted_seconds_per_token: float, rates: Sequence[float]
) -> Advice:
    """What chains of 0 to 2 K drafts would do.

    Args:
        rates: unconditional rates by position of the measured chain of K, at least one.

    A chain that measured cheaper than the plain forward (noise) counts drafts as free.
    """
    num_drafts = len(rates)
    length = 1 + sum(rates)
    round_seconds = drafted_seconds_per_token * length
    draft_seconds = max(0.0, (round_seconds - plain_seconds_per_token) / num_drafts)
    choices, reached = [Choice(0, 1.0, plain_seconds_per_token, 1 / plain_seconds_per_token, False)], 1.0
    last, before = rates[-1], rates[-2] if num_drafts > 1 else 1.0
    fall = min(1.0, last / before) if before > 0 else 0.0
    for k in range(1, 2 * num_drafts + 1):
        rate = rates[k - 1] if k <= num_drafts else last * fall ** (k - num_drafts)
        reached += rate
        cost = plain_seconds_per_token + k * draft_seconds
        choices.append(Choice(k, reached, cost, reached / cost, k > num_drafts))
    return Advice(tuple(choices), plain_seconds_per_token, draft_seconds)
