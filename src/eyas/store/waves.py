"""Waves: which training samples are on disk together when the store has a bound.

A wave is captured whole, trained, and released; the next one is captured meanwhile. Which samples meet in a
wave follows from their content, their sizes and a seed, never from what was done when, so that a run that was
interrupted trains on the same samples in the same order. Samples of other splits are kept throughout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from eyas.base.errors import ConfigError
from eyas.base.units import format_bytes
from eyas.store.entry import SampleEntry

SAMPLE_OVERHEAD_BYTES = 6 << 10
"""What a sample takes on disk beside its tensors, at most: its part of a segment's header, and, should it be
alone in its segment, that file's own part and the end of its last block."""
STORE_OVERHEAD_BYTES = 64 << 10
"""Of a bound, kept for what lies in the store beside segments."""
AT_ONCE = 2
"""Waves on disk: one that is trained, one that is captured."""


@dataclass(frozen=True)
class WaveRule:
    """All that decides the waves beside the samples themselves.

    Args:
        max_bytes: the bound on the store.
        least_bytes: what a wave has to hold at least: a training step.
        token_bytes: of the aux states of a token, and its id.
        row_bytes: of a last state.
        epochs: passes over the samples; the last may be a share of one.
        recapture: capture anew for each epoch instead of training a wave for all of them.
    """

    max_bytes: int
    least_bytes: int
    token_bytes: int
    row_bytes: int
    epochs: float
    recapture: bool
    seed: int

    def sample_bytes(self, entry: SampleEntry) -> int:
        """Bytes that a sample takes on disk, at most."""
        return entry.length * self.token_bytes + entry.num_supervised * self.row_bytes + SAMPLE_OVERHEAD_BYTES

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Wave:
    """Samples that are on disk together.

    Args:
        number: from 0, in the order of training.
        passes: each epoch that is trained on it, and the share of the wave that this takes.
        ids: in an order made of content and seed.
        num_bytes: on disk, at most.
    """

    number: int
    passes: tuple[tuple[int, float], ...]
    ids: tuple[str, ...] = field(repr=False)
    num_bytes: int

    @property
    def first_epoch(self) -> int:
        return self.passes[0][0]


@dataclass(frozen=True)
class WavePlan:
    """All waves of a training run, and the samples that stay.

    Args:
        kept: ids of the samples that are not trained on, sorted.
        kept_bytes: on disk, at most.
        again: whether a sample may be in several waves, one for each epoch.
    """

    waves: tuple[Wave, ...]
    kept: tuple[str, ...] = field(repr=False)
    kept_bytes: int
    again: bool

    def __len__(self) -> int:
        return len(self.waves)

    @cached_property
    def digest(self) -> str:
        """Identity of the waves: the same samples in the same order with the same passes."""
        hashed = hashlib.sha256()
        for wave in self.waves:
            hashed.update(f"{wave.passes}\n".encode() + "\n".join(wave.ids).encode() + b"\n\n")
        return hashed.hexdigest()[:32]

    @property
    def num_captures(self) -> int:
        """How many times a sample is captured in all, the kept ones counted."""
        return len(self.kept) + sum(len(wave.ids) for wave in self.waves)

    @property
    def most_bytes(self) -> int:
        """The largest the store becomes, at most."""
        sizes = [
            sum(self.waves[number].num_bytes for number in self.on_disk(position))
            for position in range(len(self.waves))
        ]
        return self.kept_bytes + max(sizes, default=0) + STORE_OVERHEAD_BYTES

    def on_disk(self, position: int) -> list[int]:
        """Numbers of the waves that may be stored while the first ``position`` waves are over.

        Nothing is captured ahead for another epoch: a sample lies in one segment at a time.
        """
        if position >= len(self.waves):
            return [] if len(self.waves) > 1 else [wave.number for wave in self.waves]
        here = self.waves[position : position + AT_ONCE]
        return [wave.number for wave in here if not self.again or wave.first_epoch == here[0].first_epoch]

    def epoch(self, position: int) -> int:
        """The epoch that samples are captured for, where each has captures of its own; else 0."""
        if not self.again:
            return 0
        return self.waves[min(position, len(self.waves) - 1)].first_epoch

    def over(self, position: int) -> set[str]:
        """Training samples that are not needed any more, in the present epoch where there are several."""
        if len(self.waves) == 1:
            return set()
        epoch = self.waves[position].first_epoch if position < len(self.waves) and self.again else None
        if epoch is None:
            return {name for wave in self.waves[:position] for name in wave.ids}
        needed = {name for wave in self.waves[position:] if wave.first_epoch == epoch for name in wave.ids}
        return self._trained - needed

    @cached_property
    def _trained(self) -> set[str]:
        return {name for wave in self.waves for name in wave.ids}


def plan_waves(entries: Iterable[SampleEntry], rule: WaveRule) -> WavePlan:
    """The waves of these samples; a function of the set of entries and the rule.

    When everything fits at once there is one wave with all epochs, and nothing is ever released.

    Raises:
        ConfigError: the bound cannot hold the kept samples and two waves of the least size.
    """
    entries = sorted(entries)
    sizes = {entry.id: rule.sample_bytes(entry) for entry in entries}
    lengths = {entry.id: entry.length for entry in entries}
    training = [entry.id for entry in entries if entry.split == "train"]
    kept = tuple(entry.id for entry in entries if entry.split != "train")
    kept_bytes = sum(sizes[name] for name in kept)
    room = rule.max_bytes - kept_bytes - STORE_OVERHEAD_BYTES
    passes = _passes(rule.epochs)
    total = sum(sizes[name] for name in training)
    if total <= room:
        ids = tuple(_order(training, rule.seed, "all"))
        waves = (Wave(0, passes, ids, total),) if training else ()
        return WavePlan(waves, kept, kept_bytes, False)
    largest = max(sizes[name] for name in training)
    _require_room(rule, kept_bytes, room, min(total, max(largest, rule.least_bytes)))
    if not rule.recapture and rule.epochs > 1:
        groups = [(passes, _order(training, rule.seed, "all"))]
    else:
        groups = [
            (((epoch, 1.0),), _first_share(_order(training, rule.seed, str(epoch)), lengths, share))
            for epoch, share in passes
        ]
    made: list[Wave] = []
    for taken, order in groups:
        for group in _cut(order, sizes, room // AT_ONCE):
            made.append(Wave(len(made), taken, tuple(group), sum(sizes[name] for name in group)))
    return WavePlan(tuple(made), kept, kept_bytes, len(groups) > 1)


def _passes(epochs: float) -> tuple[tuple[int, float], ...]:
    whole = math.floor(epochs)
    shares = [1.0] * whole + ([epochs - whole] if epochs > whole else [])
    return tuple(enumerate(shares))


def _order(ids: Sequence[str], seed: int, what: str) -> list[str]:
    def key(name: str) -> tuple[bytes, str]:
        return hashlib.blake2b(f"{seed}/wave/{what}/{name}".encode(), digest_size=8).digest(), name

    return sorted(ids, key=key)


def _first_share(order: list[str], lengths: Mapping[str, int], share: float) -> list[str]:
    """The first samples that hold a share of the tokens."""
    wanted, taken = share * sum(lengths[name] for name in order), 0
    for place, name in enumerate(order):
        if taken >= wanted:
            return order[:place]
        taken += lengths[name]
    return order


def _cut(order: Sequence[str], sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Neighbours in groups of at most ``limit`` bytes and of about equal size, as few as there can be."""
    total = sum(sizes[name] for name in order)
    fewest = math.ceil(total / limit)
    for number in range(fewest, fewest + 4):
        groups: list[list[str]] = [[]]
        taken = 0
        for name in order:
            if taken * number >= total * len(groups):
                groups.append([])
            groups[-1].append(name)
            taken += sizes[name]
        if all(sum(sizes[name] for name in group) <= limit for group in groups):
            return groups
    groups, filled = [], limit
    for name in order:
        if filled + sizes[name] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    return groups


def _require_room(rule: WaveRule, kept_bytes: int, room: int, least: int) -> None:
    if room >= AT_ONCE * least:
        return
    needed = kept_bytes + STORE_OVERHEAD_BYTES + AT_ONCE * least
    raise ConfigError(
        f"store.max_bytes ({format_bytes(rule.max_bytes)}) is too small for this data",
        where="[store] of eyas.toml",
        why=f"samples that are not trained on stay and take {format_bytes(kept_bytes)}, and two waves of at "
        f"least {format_bytes(least)} (a training step, the longest sample) have to lie beside them",
        hint=f"set store.max_bytes to at least {needed} bytes; better several times that, so that waves mix",
    )
