"""Batches by length under a token budget, planned from content alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Groups of similar length; the longest come first, so that memory runs out at once or never.

    Args:
        order: indices of all items, batch after batch, ``[N]``.
        edges: where batches begin in ``order``, and at last its length; int64 ``[batches + 1]``.
    """

    order: Indices
    edges: Indices

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[Indices]:
        edges = self.edges.tolist()
        return (self.order[start:end] for start, end in pairwise(edges))

    def with_any(self, wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Indices]:
        """The batches that hold a wanted item; ``wanted`` is bool ``[N]`` by index."""
        if not len(self):
            return []
        hit = np.logical_or.reduceat(wanted[self.order], self.edges[:-1])
        starts, ends = self.edges[:-1][hit].tolist(), self.edges[1:][hit].tolist()
        return [self.order[start:end] for start, end in zip(starts, ends, strict=True)]

    def padding_share(self, lengths: np.ndarray[Any, Any]) -> float:
        """Padded positions over all positions, between 0 and 1; ``lengths`` is ``[N]`` by index."""
        if not len(self):
            return 0.0
        longest = lengths[self.order[self.edges[:-1]]].astype(np.int64)
        padded = int((longest * np.diff(self.edges)).sum())
        return 1.0 - int(lengths.sum(dtype=np.int64)) / padded


def plan_lengths(lengths: np.ndarray[Any, Any], budget_tokens: int) -> BatchPlan:
    """Group items so that no group holds more than ``budget_tokens``, padding counted.

    Items are taken from the longest down, equal lengths in the order given; each batch takes as many as fit.

    Args:
        lengths: tokens of each item, integers ``[N]``, in an order that depends on content alone.
        budget_tokens: ``len(batch) * longest(batch)`` stays at or below it; an item that is longer
            by itself gets a batch of its own.

    Raises:
        ValueError: the budget is not positive, or a length is not.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be positive, not {budget_tokens}")
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError("every item has at least one token")
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order].tolist()
    edges = [0]
    while edges[-1] < len(descending):
        num_items = max(1, budget_tokens // descending[edges[-1]])
        edges.append(min(edges[-1] + num_items, len(descending)))
    return BatchPlan(order.astype(np.int64), np.array(edges, dtype=np.int64))


def plan_batches(items: Sequence[tuple[str, int]], budget_tokens: int) -> list[list[int]]:
    """As `plan_lengths`, for items in any order.

    The plan is a function of the set of ``(id, length)`` pairs: items are sorted by length, then by id.
    A redone batch is the same batch whatever was finished before, as long as the caller plans over all
    items and skips whole batches that are done.

    Args:
        items: an id and a length in tokens for each item; ids are distinct.

    Returns:
        Indices into ``items``.
    """
    by_id = sorted(range(len(items)), key=lambda index: items[index][0])
    plan = plan_lengths(np.array([items[index][1] for index in by_id], dtype=np.int64), budget_tokens)
    return [[by_id[index] for index in batch.tolist()] for batch in plan]
