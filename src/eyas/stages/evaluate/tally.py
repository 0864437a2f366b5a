"""What drafted answers showed beside plain ones: acceptance by domain, and whether texts are the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from eyas.drafter.acceptance import AcceptanceCounts
from eyas.drafter.speculate import Decoded
from eyas.stages.evaluate.ties import parting
from eyas.targets.local.model import LocalTarget


@dataclass
class DraftTally:
    """Sums over answers that were drafted in one way.

    Attributes:
        num_drafts: most drafts that a round can accept.
        counts: of each answer, by domain.
        ties: texts whose first difference is a numeric tie; ``largest_tie`` is the widest gap among them.
        different: the others that differ.
    """

    num_drafts: int
    counts: dict[str, list[AcceptanceCounts]] = field(default_factory=lambda: defaultdict(list))
    num_answers: int = 0
    num_tokens: int = 0
    equal: int = 0
    ties: int = 0
    largest_tie: float = 0.0
    different: list[dict[str, object]] = field(default_factory=list)

    def add(
        self,
        target: LocalTarget,
        conversation: str,
        domain: str,
        prompt: Sequence[int],
        plain: Decoded,
        drafted: Decoded,
    ) -> None:
        """Count one answer."""
        self.counts[domain].append(drafted.counts)
        self.num_answers += 1
        self.num_tokens += len(drafted.tokens)
        found = parting(target, prompt, plain.tokens, drafted.tokens)
        if found is None:
            self.equal += 1
        elif found.tied:
            self.ties += 1
            self.largest_tie = max(self.largest_tie, found.gap)
        else:
            gap = found.gap if isfinite(found.gap) else None  # JSON knows no infinity
            self.different.append({"conversation": conversation, "logit_gap": gap, "allowed": found.allowed})

    @property
    def total(self) -> AcceptanceCounts:
        """Over all answers."""
        return AcceptanceCounts.total(
            (count for counts in self.counts.values() for count in counts), self.num_drafts
        )

    def as_dict(self, num_prompts: Mapping[str, int]) -> dict[str, Any]:
        """Counts, rates, domains and texts as the report keeps them."""
        return {
            **self.total.as_dict(),
            "domains": {
                domain: {
                    "num_prompts": num_prompts[domain],
                    **AcceptanceCounts.total(counts, self.num_drafts).as_dict(),
                }
                for domain, counts in sorted(self.counts.items())
            },
            "lossless": {
                "num_prompts": self.num_answers,
                "equal": self.equal,
                "ties": self.ties,
                "largest_tie": self.largest_tie,
                "different": len(self.different),
                "differences": self.different,
            },
        }
