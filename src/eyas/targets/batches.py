"""Batches by length under a token budget, planned from content alone."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(items: Sequence[tuple[str, int]], budget_tokens: int) -> list[list[int]]:
    """Group items of similar length so that no group holds more than ``budget_tokens``, padding counted.

    The plan is a function of the set of ``(id, length)`` pairs: items are sorted by length, then by id,
    and cut from the longest down. A redone batch is the same batch whatever was finished before,
    as long as the caller plans over all items and skips whole batches that are done.

    Args:
        items: an id and a length in tokens for each item; ids are distinct.
        budget_tokens: ``len(batch) * longest(batch)`` stays at or below it; an item that is longer
            by itself gets a batch of its own.

    Returns:
        Indices into ``items``; the longest batches come first, so that memory runs out at once or never.

    Raises:
        ValueError: the budget is not positive, or a length is not.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be positive, not {budget_tokens}")
    if any(length < 1 for _, length in items):
        raise ValueError("every item has at least one token")
    order = sorted(range(len(items)), key=lambda i: (-items[i][1], items[i][0]))
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        length = items[index][1]
        if batches and (len(batches[-1]) + 1) * longest <= budget_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = length
    return batches


def padding_share(items: Sequence[tuple[str, int]], batches: Sequence[Sequence[int]]) -> float:
    """Padded positions over all positions of a plan, between 0 and 1."""
    padded = sum(len(batch) * max(items[i][1] for i in batch) for batch in batches)
    return 0.0 if padded == 0 else 1.0 - sum(items[i][1] for batch in batches for i in batch) / padded
