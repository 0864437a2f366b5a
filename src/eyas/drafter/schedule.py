"""The learning rate, and which samples meet in which step.

Both depend only on content and seed: the same samples give the same steps, whatever was done before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Schedule = Literal["cosine", "wsd"]


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    warmup: float,
    min_ratio: float,
    schedule: Schedule = "cosine",
    decay: float = 0.2,
) -> float:
    """Rate of optimizer step ``step`` (from 0), after a linear rise over ``warmup`` of the steps.

    ``cosine`` falls from there to ``min_ratio`` of the peak (Loshchilov and Hutter, 2017). ``wsd`` (warm-up,
    stable, decay) stays at the peak and falls over the last ``decay`` of the steps as one minus a square
    root (Haegele et al., 2024).
    """
    rising = math.ceil(total_steps * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    last = total_steps - 1
    start = rising if schedule == "cosine" else max(rising, last - math.ceil(total_steps * decay))
    share = min(1.0, max(0, step - start) / max(1, last - start))
    high = 0.5 * (1 + math.cos(math.pi * share)) if schedule == "cosine" else 1 - math.sqrt(share)
    return peak * (min_ratio + (1 - min_ratio) * high)


def epoch_order(ids: Sequence[str], seed: int, epoch: int) -> list[str]:
    """A permutation of ``ids`` that depends on their content, the seed and the epoch only."""

    def key(sample_id: str) -> tuple[bytes, str]:
        text = f"{seed}/{epoch}/{sample_id}".encode()
        return hashlib.blake2b(text, digest_size=8).digest(), sample_id

    return sorted(ids, key=key)


def pack_by_tokens(ids: Sequence[str], lengths: dict[str, int], budget: int) -> list[list[str]]:
    """Batches of neighbours within a token budget; a longer sample gets one of its own."""
    batches: list[list[str]] = []
    filled = budget
    for sample_id in ids:
        length = lengths[sample_id]
        if filled + length > budget:
            batches.append([])
            filled = 0
        batches[-1].append(sample_id)
        filled += length
    return batches


@dataclass(frozen=True)
class TrainedWave:
    """Samples that are there at the same time, and what is trained on them before they go.

    Args:
        passes: each epoch, and the share of these samples that it takes, by tokens.
    """

    ids: tuple[str, ...]
    passes: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step: an epoch, its place in it (or in the wave's part of it), and its batches."""

    epoch: int
    place: int
    batches: tuple[tuple[str, ...], ...]

    def only(self, there: Collection[str]) -> PlannedStep:
        """The step without samples that are not ``there``; it may have no batch."""
        batches = (tuple(name for name in batch if name in there) for batch in self.batches)
        return replace(self, batches=tuple(batch for batch in batches if batch))

    @property
    def samples(self) -> list[str]:
        """All samples of the step, in order."""
        return [name for batch in self.batches for name in batch]


def dealt_out(
    step: PlannedStep,
    lengths: Mapping[str, int],
    costs: Mapping[str, float],
    budget: int,
    num_processes: int,
) -> list[list[tuple[str, ...]]]:
    """The batches of each process: together the samples of a step, each once.

    One process takes the batches as planned. For several, samples go by cost, the dearest first, to the
    process that has least to do (Graham's rule, 1969) and there into a batch that has room; no batch exceeds
    the budget of tokens unless one sample does. A process may have no batch.
    """
    if num_processes == 1:
        return [list(step.batches)]
    each = math.ceil(len(step.batches) / num_processes)
    order = step.samples
    bins: list[list[int]] = [[] for _ in range(each * num_processes)]
    owners = [i % num_processes for i in range(len(bins))]
    filled = [0] * len(bins)
    loads = [0.0] * num_processes
    for place in sorted(range(len(order)), key=lambda i: (-costs[order[i]], i)):
        length = lengths[order[place]]
        fitting = [i for i, taken in enumerate(filled) if not taken or taken + length <= budget]
        if fitting:
            best = min(fitting, key=lambda i: (loads[owners[i]], filled[i], i))
        else:
            best = len(bins)
            bins.append([])
            filled.append(0)
            owners.append(loads.index(min(loads)))
        bins[best].append(place)
        filled[best] += length
        loads[owners[best]] += costs[order[place]]
    dealt: list[list[tuple[str, ...]]] = [[] for _ in range(num_processes)]
    for owner, places in zip(owners, bins, strict=True):
        if places:
            dealt[owner].append(tuple(order[i] for i in sorted(places)))
    return dealt


class TrainingPlan:
    """All optimizer steps of a run.

    Args:
        lengths: tokens of each training sample.
        epochs: passes; a fraction takes the first batches of the last epoch's order, by tokens.
        waves: samples that are there one wave after the other; they say the epochs then. No step holds
            samples of two waves.
    """

    def __init__(
        self,
        lengths: dict[str, int],
        *,
        epochs: float,
        batch_tokens: int,
        accumulate: int,
        seed: int,
        waves: Sequence[TrainedWave] | None = None,
    ) -> None:
        self.lengths = lengths
        self._batch_tokens, self._accumulate, self._seed = batch_tokens, accumulate, seed
        if waves is None:
            whole = math.floor(epochs)
            shares = [1.0] * whole + ([epochs - whole] if epochs > whole else [])
            waves = [TrainedWave(tuple(self.lengths), tuple(enumerate(shares)))]
        self.steps: list[PlannedStep] = []
        self.wave_ends: list[int] = []
        """Steps that are done when each wave is over."""
        for wave in waves:
            for epoch, share in wave.passes:
                self.steps += self._epoch(wave.ids, epoch, share)
            self.wave_ends.append(len(self.steps))

    def _epoch(self, ids: Sequence[str], epoch: int, share: float) -> list[PlannedStep]:
        order = epoch_order(ids, self._seed, epoch)
        batches = pack_by_tokens(order, self.lengths, self._batch_tokens)
        if share < 1:
            wanted, taken, count = share * self.num_tokens(ids), 0, 0
            while count < len(batches) and taken < wanted:
                taken += self.num_tokens(batches[count])
                count += 1
            batches = batches[:count]
        steps = []
        for start in range(0, len(batches), self._accumulate):
            group = tuple(tuple(batch) for batch in batches[start : start + self._accumulate])
            steps.append(PlannedStep(epoch, start // self._accumulate, group))
        return steps

    def waves_over(self, step: int) -> int:
        """How many waves are over after so many steps."""
        return sum(end <= step for end in self.wave_ends)

    def num_tokens(self, ids: Sequence[str]) -> int:
        """Tokens of some samples."""
        return sum(self.lengths[sample_id] for sample_id in ids)

    def step_tokens(self, step: PlannedStep) -> int:
        """Tokens of one optimizer step."""
        return sum(self.num_tokens(batch) for batch in step.batches)

    def validation_steps(self, count: int) -> set[int]:
        """Numbers of finished steps after which to validate: ``count`` of them, the last at the end."""
        total = len(self.steps)
        return {math.ceil(total * (i + 1) / count) for i in range(count)} - {0}
