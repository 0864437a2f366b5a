"""Whether two greedy texts that differ do so at a numeric tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.targets.compare import TIE_GAPS
from eyas.targets.local.model import LocalTarget


@dataclass(frozen=True)
class Parting:
    """Where two texts part.

    Attributes:
        gap: of the two tokens' logits; infinite when one text merely goes on where the other ended.
        allowed: largest gap that counts as a tie in the target's arithmetic.
    """

    gap: float
    allowed: float

    @property
    def tied(self) -> bool:
        return self.gap <= self.allowed


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs; None when the texts are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def parting(
    target: LocalTarget, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]
) -> Parting | None:
    """The gap of the two tokens' logits where the texts part, by one forward pass over what they share.

    None when the texts are equal.
    """
    place = first_difference(plain, drafted)
    if place is None:
        return None
    if place >= min(len(plain), len(drafted)):
        return Parting(float("inf"), 0.0)
    ids = target.padded([[*prompt, *plain[:place]]])
    with torch.no_grad():
        logits = target.logits(target.states(ids)[:, -1])[0].double()
    gap = float((logits[plain[place]] - logits[drafted[place]]).abs())
    return Parting(gap, TIE_GAPS[target.dtype])
