"""What compacting and clearing away change in the ledger, each in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eyas.base.clock import utc_now_text
from eyas.base.errors import DataError
from eyas.store.ledger import Ledger


@dataclass(frozen=True)
class SegmentUse:
    """A present segment and how many samples are stored in it now."""

    name: str
    num_bytes: int
    num_samples: int
    num_used: int

    @property
    def is_superseded(self) -> bool:
        """Whether no sample is stored in it any more: others hold all of them."""
        return self.num_used == 0


def segment_uses(ledger: Ledger) -> list[SegmentUse]:
    """All present segments by name; one pass over the samples."""
    used = ledger.stored_counts()
    return [
        SegmentUse(record.name, record.num_bytes, record.num_samples, used.get(record.name, 0))
        for record in ledger.segments()
    ]


def segment_of(ledger: Ledger, sample: str) -> str | None:
    """The segment that a sample is stored in; None when it is not stored."""
    with ledger.reading() as connection:
        row = connection.execute("SELECT segment FROM samples WHERE id = ?", (sample,)).fetchone()
    return None if row is None else row[0]


def move_samples(
    ledger: Ledger,
    name: str,
    num_bytes: int,
    recipe: str,
    sizes: Sequence[tuple[str, int]],
    sources: Collection[str],
) -> int:
    """Note a new segment that is durable on disk and move samples from older ones into it.

    A sample moves only from one of ``sources``; the older segments stay known, without samples.

    Args:
        sizes: id and number of tokens of each sample in the new segment.

    Returns:
        How many samples moved.

    Raises:
        DataError: the ledger has a segment of this name.
    """
    moved = 0
    with ledger.transaction() as connection:
        if connection.execute("SELECT 1 FROM segments WHERE name = ?", (name,)).fetchone():
            raise DataError("the ledger has a segment of this name", where=name)
        tokens = sum(length for _, length in sizes)
        connection.execute(
            "INSERT INTO segments (name, bytes, num_samples, num_tokens, recipe, committed_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (name, num_bytes, len(sizes), tokens, recipe, utc_now_text()),
        )
        for sample, _ in sizes:
            if segment_of(ledger, sample) in sources:
                connection.execute("UPDATE samples SET segment = ? WHERE id = ?", (name, sample))
                moved += 1
        ledger.event("segments_compacted", {"segment": name, "samples": moved, "of": sorted(sources)})
    return moved


def forget_segment(ledger: Ledger, name: str) -> None:
    """Drop a segment that holds no sample any more. Raises DataError when it still does."""
    with ledger.transaction() as connection:
        if connection.execute("SELECT 1 FROM samples WHERE segment = ? LIMIT 1", (name,)).fetchone():
            raise DataError("samples are stored in this segment", where=name)
        connection.execute("DELETE FROM segments WHERE name = ?", (name,))
        ledger.event("segment_cleared", {"segment": name})
