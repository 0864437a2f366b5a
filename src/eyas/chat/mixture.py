"""Which records make the mixture, and which of them validate: by seed and content, never by position."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from eyas.base.errors import ConfigError

Split = Literal["train", "validation"]
Item = TypeVar("Item")

DUPLICATE = "duplicate"
OVER_LIMIT = "over the source's limit"
OVER_SHARE = "over the source's share"


@dataclass
class SourceKeys:
    """Line and content key of every usable record of one source; about 100 bytes a record."""

    name: str
    limit: int | None = None
    share: float | None = None
    lines: array[int] = field(default_factory=lambda: array("q"))
    keys: list[bytes] = field(default_factory=list)

    def add(self, line: int, key: bytes) -> None:
        """Note one record."""
        self.lines.append(line)
        self.keys.append(key)


def choose(sources: Sequence[SourceKeys], seed: int) -> list[dict[int, str]]:
    """For each source: lines that stay out of the mixture, with the reason.

    Of equal content the first in the order of the sources stays. A limit takes the records with the
    lowest seeded hash among those that no earlier source gave. Shares are then cut to the largest
    mixture in which every source keeps to its share; the total is of records, token rows included.

    Raises:
        ConfigError: the shares leave nothing.
    """
    left_out: list[dict[int, str]] = []
    chosen: list[list[int]] = []
    taken: set[bytes] = set()
    for source in sources:
        reasons: dict[int, str] = {}
        own: set[bytes] = set()
        fresh: list[int] = []
        for position, key in enumerate(source.keys):
            if key in taken or key in own:
                reasons[source.lines[position]] = DUPLICATE
            else:
                own.add(key)
                fresh.append(position)
        if source.limit is not None or source.share is not None:
            fresh.sort(key=lambda position: seeded_number(seed, "order", source.keys[position]))
        if source.limit is not None:
            for position in fresh[source.limit :]:
                reasons[source.lines[position]] = OVER_LIMIT
            fresh = fresh[: source.limit]
        taken.update(source.keys[position] for position in fresh)
        left_out.append(reasons)
        chosen.append(fresh)
    allowed = within_shares([len(fresh) for fresh in chosen], [source.share for source in sources])
    if any(chosen) and not any(allowed):
        shares = ", ".join(f"{s.name} {s.share}" for s in sources if s.share is not None)
        raise ConfigError(
            "the shares of the sources leave no record",
            where="data.sources",
            why=f"every source is limited to a share, and they add up to less than the whole ({shares})",
            hint="leave one source without a share, or use limit",
        )
    for source, fresh, reasons, count in zip(sources, chosen, left_out, allowed, strict=True):
        for position in fresh[count:]:
            reasons[source.lines[position]] = OVER_SHARE
    return left_out


def within_shares(counts: Sequence[int], shares: Sequence[float | None]) -> list[int]:
    """The largest counts, none above ``counts``, in which no source exceeds its share of their sum."""
    kept = list(counts)
    while True:
        total = sum(kept)
        # 0.29 of 100 is 29 in arithmetic and 28.999999999999996 in floats.
        cut = [
            count if share is None else min(count, int(share * total + 1e-9))
            for count, share in zip(kept, shares, strict=True)
        ]
        if cut == kept:
            return kept
        kept = cut


def seeded_number(seed: int, purpose: str, key: bytes) -> float:
    """A number in [0, 1) that depends on nothing but seed, purpose and content."""
    digest = hashlib.blake2b(f"{purpose}|{seed}|".encode() + key, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


class Splitter(Generic[Item]):
    """Gives conversations to train or validation as they stream by.

    A conversation validates when the seeded number of its key lies below ``fraction``. Neither side
    stays empty where there are two conversations and a fraction between 0 and 1: until a side has
    its first, the one nearest to it is held back, and goes there at the end.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction = fraction
        self._seed = seed
        self._seen: set[Split] = set()
        self._held: tuple[float, Item] | None = None
        self._num_items = 0

    def push(self, key: bytes, item: Item) -> Iterator[tuple[Item, Split]]:
        """Take one conversation, and give those whose side is known."""
        number = seeded_number(self._seed, "split", key)
        split = self._natural(number)
        self._num_items += 1
        if len(self._seen) == 2 or self._fraction in (0.0, 1.0):
            yield item, split
            return
        if self._held is None:
            if not self._seen:
                self._seen.add(split)
                self._held = (number, item)
            return
        held_number, held = self._held
        if split not in self._seen:
            self._seen.add(split)
            self._held = None
            yield held, self._natural(held_number)
            yield item, split
        elif abs(number - self._fraction) < abs(held_number - self._fraction):
            self._held = (number, item)
            yield held, split
        else:
            yield item, split

    def finish(self) -> Iterator[tuple[Item, Split]]:
        """The conversation that was held back, if there is one."""
        if self._held is None:
            return
        number, item = self._held
        self._held = None
        if self._num_items == 1:
            yield item, "train"
        else:
            yield item, "train" if self._natural(number) == "validation" else "validation"

    def _natural(self, number: float) -> Split:
        return "validation" if number < self._fraction else "train"
