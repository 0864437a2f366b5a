"""Acceptance length for every chain length, from stored states alone: no generation.

Along a stored answer every draft of every row is known after one unrolled pass, and greedy speculative
decoding is a walk: from a row, follow the drafts while they equal the stored tokens, then step over the
target's own token. The same pass serves every chain length. For answers that were sampled, or for another
temperature, the walk is an estimate.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.base.stop import StopFlag
from eyas.drafter.batch import PackedBatch, pack
from eyas.drafter.metrics import answer_ranges
from eyas.drafter.model import EagleDrafter
from eyas.drafter.schedule import pack_by_tokens
from eyas.drafter.source import SampleSource
from eyas.drafter.vocabulary import DraftVocabulary

PLACES = (0, 32, 128, 512)
"""Where stretches of an answer begin, in tokens, whose rounds are counted apart; the last has no end."""
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
    """For each sample, rounds and accepted drafts of chains of 1..``max_drafts``.

    Returns:
        int64 ``[stretches, 2, max_drafts]``: a round counts in the stretch of `PLACES` it begins in.

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
            found = np.zeros((len(PLACES), 2, max_drafts), dtype=np.int64)
            for start, end in answer_ranges(batch.query_rows[first:last], [0, last - first]):
                for chain in range(1, max_drafts + 1):
                    for place, accepted in walked(followed[:chain, first + start : first + end]):
                        found[stretch_of(place), :, chain - 1] += (1, accepted)
            counts[name] = found
    return counts


def walked(followed: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Rounds of speculative decoding along a stored answer: place of each, and its accepted drafts.

    Args:
        followed: as `eyas.drafter.metrics.walk` takes it.
    """
    # how many drafts in a row are followed at each place, then jumps over them
    accepted = followed.cumprod(axis=0).sum(axis=0)
    place = 0
    while place < len(accepted):
        yield place, int(accepted[place])
        place += int(accepted[place]) + 1


def stretch_of(place: int) -> int:
    """Number of the stretch of `PLACES` that a place of an answer lies in."""
    return bisect.bisect_right(PLACES, place) - 1


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
        counts: of `walk_counts`, or one stretch of them ``[2, K]``.
        groups: conversation of each sample.
    """
    by_group: dict[str, npt.NDArray[np.int64]] = {}
    for sample, every in counts.items():
        found = every.reshape(-1, *every.shape[-2:]).sum(axis=0)
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


def predict_by(
    counts: Mapping[str, npt.NDArray[np.int64]], groups: Mapping[str, str], labels: Mapping[str, str]
) -> dict[str, list[Predicted]]:
    """`predict` of the samples of each label, for example of each domain."""
    by_label: dict[str, dict[str, npt.NDArray[np.int64]]] = {}
    for sample, found in counts.items():
        by_label.setdefault(labels[sample], {})[sample] = found
    return {label: predict(found, groups) for label, found in sorted(by_label.items())}


def predict_by_place(
    counts: Mapping[str, npt.NDArray[np.int64]], groups: Mapping[str, str]
) -> list[tuple[int, list[Predicted]]]:
    """`predict` of each stretch of the answers that has a round: where it begins, and its rows."""
    found = []
    for stretch, begin in enumerate(PLACES):
        inside = {sample: every[stretch] for sample, every in counts.items() if every[stretch, 0].any()}
        if inside:
            found.append((begin, predict(inside, groups)))
    return found


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
