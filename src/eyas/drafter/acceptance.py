"""Counts of speculative decoding and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class AcceptanceCounts:
    """Rounds and drafts of one answer, or of many.

    A round is one forward pass of the target over the pending token and the drafts behind it. The
    forward pass over the prompt is no round, and the token it gives is no draft. What counts does not
    depend on the other answers in a batch:

    - a draft is counted (``drafted``) when the answer's length limit leaves room for it and for the
      token that the round gives for nothing; of a tree, one at each depth that it may reach;
    - it is ``reached`` when all earlier drafts of its round were accepted and did not end the answer;
    - it is ``accepted`` when it became part of the answer; an accepted end token counts, what the target
      would have said after it does not.

    Attributes:
        drafted, reached, accepted: per position in the chain, from 0.
    """

    rounds: int
    drafted: list[int]
    reached: list[int]
    accepted: list[int]

    @classmethod
    def empty(cls, num_drafts: int) -> AcceptanceCounts:
        """Nothing counted yet, for chains of ``num_drafts``."""
        return cls(0, [0] * num_drafts, [0] * num_drafts, [0] * num_drafts)

    def count_round(self, *, usable: int, accepted: int, ended_by_draft: bool) -> None:
        """Count one round with ``usable`` drafts of which the first ``accepted`` became answer."""
        self.rounds += 1
        for position in range(usable):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted
            self.reached[position] += position < accepted or (position == accepted and not ended_by_draft)

    @classmethod
    def total(cls, counts: Iterable[AcceptanceCounts], num_drafts: int) -> AcceptanceCounts:
        """The sum: every round weighs the same, not every prompt."""
        total = cls.empty(num_drafts)
        for one in counts:
            total.rounds += one.rounds
            for position in range(len(one.drafted)):
                total.drafted[position] += one.drafted[position]
                total.reached[position] += one.reached[position]
                total.accepted[position] += one.accepted[position]
        return total

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts / target forwards (the bonus token counted); 1.0 without a round."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def conditional_rates(self) -> list[float]:
        """Accepted / reached, per position."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def unconditional_rates(self) -> list[float]:
        """Accepted / drafted, per position."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates as reports keep them."""
        return {
            "acceptance_length": self.acceptance_length,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "reached": self.reached,
            "accepted": self.accepted,
            "conditional_rates": self.conditional_rates,
            "unconditional_rates": self.unconditional_rates,
        }
