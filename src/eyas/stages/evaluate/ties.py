"""Whether two greedy texts that differ do so at a numeric tie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.targets.compare import TIE_GAPS
from eyas.targets.local.model import LocalTarget

__all__ = ["TIE_GAPS", "first_difference", "tie_gap"]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs; None when the texts are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def tie_gap(
    target: LocalTarget, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]
) -> float:
    """Gap of the two tokens' logits where the texts part, by one forward pass over what they share.

    Infinite when one text merely goes on where the other ended.
    """
    place = first_difference(plain, drafted)
    if place is None:
        return 0.0
    if place >= min(len(plain), len(drafted)):
        return float("inf")
    ids = target.padded([[*prompt, *plain[:place]]])
    with torch.no_grad():
        logits = target.logits(target.states(ids)[:, -1])[0].double()
    return float((logits[plain[place]] - logits[drafted[place]]).abs())
