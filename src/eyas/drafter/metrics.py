"""Validation numbers that predict what serving will measure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.drafter.batch import PackedBatch
from eyas.drafter.loss import RowFacts
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.drafter.world import World

_ARRAYS = ("rows", "losses", "acceptance", "hits", "reached", "chained")


@dataclass
class ValidationTotals:
    """Sums over validation rows, per draft step; `summary` turns them into rates.

    A hit is a draft that equals the target's most likely token over its whole vocabulary, so a token
    that cannot be drafted is a miss. All rows follow the stored tokens, as greedy serving does for
    answers that were greedy.
    """

    steps: int
    rows: npt.NDArray[np.float64] = field(init=False)
    losses: npt.NDArray[np.float64] = field(init=False)
    acceptance: npt.NDArray[np.float64] = field(init=False)
    hits: npt.NDArray[np.float64] = field(init=False)
    reached: npt.NDArray[np.float64] = field(init=False)
    chained: npt.NDArray[np.float64] = field(init=False)
    walk_rounds: int = 0
    walk_accepted: int = 0
    bad_samples: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            setattr(self, name, np.zeros(self.steps))

    def add(
        self,
        batch: PackedBatch,
        facts: RowFacts,
        vocabulary: DraftVocabulary,
        top_tokens: npt.NDArray[np.int64],
    ) -> None:
        """Count one batch; ``top_tokens [N]`` are the target's, in the order of step 0."""
        targets = batch.targets.cpu().numpy()
        alive = np.ones(len(batch.query_rows), dtype=bool)
        followed = np.zeros((self.steps, len(batch.query_rows)), dtype=bool)
        for step, kept in enumerate(batch.kept):
            losses = facts.losses[step].double().cpu().numpy()
            if not np.isfinite(losses).all():
                self.bad_samples += [name for name in batch.ids if name not in self.bad_samples]
                continue
            drafted = vocabulary.target_ids[facts.drafts[step].cpu().numpy()]
            hits = drafted == top_tokens[kept + step]
            self.rows[step] += len(kept)
            self.losses[step] += losses.sum()
            self.acceptance[step] += facts.acceptance[step].double().sum().item()
            self.hits[step] += hits.sum()
            self.reached[step] += alive[kept].sum()
            still = np.zeros_like(alive)
            still[kept] = alive[kept] & hits
            alive = still
            self.chained[step] += alive.sum()
            followed[step, kept] = drafted == targets[kept + step]
        for start, end in answer_ranges(batch.query_rows, batch.query_bounds):
            rounds, accepted = walk(followed[:, start:end])
            self.walk_rounds += rounds
            self.walk_accepted += accepted

    def joined(self, world: World) -> None:
        """Take in what the other processes have counted; all end with the same totals."""
        arrays = [getattr(self, name) for name in _ARRAYS]
        numbers = world.total([*np.concatenate(arrays), self.walk_rounds, self.walk_accepted])
        for name, part in zip(_ARRAYS, np.split(np.array(numbers[:-2]), len(_ARRAYS)), strict=True):
            setattr(self, name, part)
        self.walk_rounds, self.walk_accepted = int(numbers[-2]), int(numbers[-1])
        self.bad_samples = [name for names in world.from_all(self.bad_samples) for name in names]

    def summary(self) -> dict[str, Any]:
        """The validation row of the metrics file.

        ``top1``: hits over rows. ``conditional``: hits over rows whose earlier steps all hit.
        ``acceptance``: mean rate at which sampling at temperature 1 accepts drafts that are sampled.
        ``predicted_tau``: 1 + sum over k of the product of the first k conditional rates, for chains of
        1..J drafts. ``walk_tau``: acceptance length of a walk over the stored answers with J drafts a
        round.
        """
        conditional = _ratio(self.chained, self.reached)
        return {
            "loss": _ratio(self.losses, self.rows),
            "top1": _ratio(self.hits, self.rows),
            "acceptance": _ratio(self.acceptance, self.rows),
            "conditional": conditional,
            "predicted_tau": [float(x) for x in 1 + np.cumsum(np.cumprod(conditional))],
            "walk_tau": 1 + self.walk_accepted / self.walk_rounds if self.walk_rounds else 1.0,
            "rows": [int(x) for x in self.rows],
        }


def walk(followed: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Speculative decoding along a stored answer: (rounds, accepted drafts).

    Args:
        followed: ``[J, n]`` whether the draft of step j made at row i equals the stored token; False where
            step j is not supervised, that is past the end of the answer.
    """
    position = rounds = accepted = 0
    num_steps, num_rows = followed.shape
    while position < num_rows:
        count = 0
        while count < num_steps and followed[count, position]:
            count += 1
        rounds += 1
        accepted += count
        position += count + 1
    return rounds, accepted


def answer_ranges(query_rows: npt.NDArray[np.int64], query_bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of places whose rows follow each other within one sample: one answer each."""
    breaks = set(query_bounds) | {int(i) + 1 for i in np.flatnonzero(np.diff(query_rows) != 1)}
    edges = sorted(breaks | {0, len(query_rows)})
    return list(itertools.pairwise(edges))


def _ratio(top: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64]) -> list[float]:
    return [float(a / b) if b else 0.0 for a, b in zip(top, bottom, strict=True)]
