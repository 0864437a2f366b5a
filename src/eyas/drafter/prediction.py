"""Acceptance length for every chain length, from stored states alone: no generation.

Along a stored answer every draft of every row is known after one unrolled pass, and greedy speculative
decoding is a walk: from a row, follow the drafts while they equal the stored tokens, then step over the
target's own token. The same pass serves every chain length. For answers that were sampled, or for another
temperature, the walk is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.base.stop import StopFlag
from eyas.drafter.batch import PackedBatch, pack
from eyas.drafter.metrics import answer_ranges, walk
from eyas.drafter.model import EagleDrafter
from eyas.drafter.schedule import pack_by_tokens
from eyas.drafter.source import SampleSource
from eyas.drafter.vocabulary import DraftVocabulary

RESAMPLES = 2000
CONFIDENCE = 0.95
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Predicted:
    """Acceptance length of a chain of ``num_drafts``, with a bootstrap interval over conversations."""

    num_drafts: int
    acceptance_length: float
    low: float
    high: float


@torch.no_grad()
def walk_counts(
    drafter: EagleDrafter,
    vocabulary: DraftVocabulary,
    source: SampleSource,
    *,
    max_drafts: int,
    batch_tokens: int,
    stop: StopFlag,
) -> dict[str, npt.NDArray[np.int64]]:
    """For each sample, rounds and accepted drafts of chains of 1..``max_drafts``: int64 ``[2, max_drafts]``.

    Raises:
        Stopped: a stop was asked for.
    """
    weight = drafter.fc.weight
    counts: dict[str, npt.NDArray[np.int64]] = {}
    lengths = dict(source.lengths())
    for ids in pack_by_tokens(sorted(lengths), lengths, batch_tokens):
        stop.check()
        batch = pack(source.load(ids), device=weight.device, dtype=weight.dtype, steps=max_drafts)
        if batch is None:
            continue
        followed = _followed(drafter, vocabulary, batch, max_drafts)
        for name, (first, last) in zip(
            batch.ids, zip(batch.query_bounds[:-1], batch.query_bounds[1:], strict=True), strict=True
        ):
            found = np.zeros((2, max_drafts), dtype=np.int64)
            for start, end in answer_ranges(batch.query_rows[first:last], [0, last - first]):
                for chain in range(1, max_drafts + 1):
                    found[:, chain - 1] += walk(followed[:chain, first + start : first + end])
            counts[name] = found
    return counts


def _followed(
    drafter: EagleDrafter, vocabulary: DraftVocabulary, batch: PackedBatch, steps: int
) -> npt.NDArray[np.bool_]:
    """``[steps, N]``: the draft of a step equals the stored token; False where the step is not supervised."""
    targets = batch.targets.cpu().numpy()
    followed = np.zeros((steps, len(batch.query_rows)), dtype=np.bool_)
    for step, states in enumerate(drafter.unroll(batch, steps)):
        kept = batch.kept[step]
        drafted = vocabulary.target_ids[_top(states, drafter.lm_head.weight).cpu().numpy()]
        followed[step, kept] = drafted == targets[kept + step]
    return followed


def _top(states: Tensor, head: Tensor) -> Tensor:
    starts = range(0, len(states), CHUNK_ROWS)
    pieces = [F.linear(states[start : start + CHUNK_ROWS], head).argmax(dim=-1) for start in starts]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)


def predict(
    counts: Mapping[str, npt.NDArray[np.int64]], groups: Mapping[str, str], *, seed: int = 0
) -> list[Predicted]:
    """Acceptance length and interval for each chain length.

    Rounds weigh the same, as in `eyas.drafter.acceptance`; the bootstrap (Efron, 1979) draws whole
    conversations, since rounds of one answer are alike.

    Args:
        counts: of `walk_counts`.
        groups: conversation of each sample.
    """
    by_group: dict[str, npt.NDArray[np.int64]] = {}
    for sample, found in counts.items():
        group = groups[sample]
        by_group[group] = by_group[group] + found if group in by_group else found
    if not by_group:
        return []
    stacked = np.stack([by_group[name] for name in sorted(by_group)])
    drawn = np.random.default_rng(seed).integers(0, len(stacked), size=(RESAMPLES, len(stacked)))
    resampled = np.stack([stacked[rows].sum(axis=0) for rows in drawn])
    edges = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_lengths(resampled), [edges, 1 - edges], axis=0)
    whole = _lengths(stacked.sum(axis=0))
    return [
        Predicted(chain + 1, float(whole[chain]), float(low[chain]), float(high[chain]))
        for chain in range(len(whole))
    ]


def _lengths(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """``[..., 2, K]`` rounds and accepted to acceptance lengths ``[..., K]``."""
    rounds, accepted = counts[..., 0, :], counts[..., 1, :]
    result: npt.NDArray[np.float64] = 1 + accepted / np.maximum(rounds, 1)
    return result


def as_rows(predicted: Iterable[Predicted]) -> Sequence[dict[str, float]]:
    """As reports keep them."""
    return [
        {
            "num_drafts": one.num_drafts,
            "acceptance_length": one.acceptance_length,
            "low": one.low,
            "high": one.high,
        }
        for one in predicted
    ]
