"""The store brought to where training stands: waves that are over go, what is needed again becomes pending.

Everything follows from the plan of waves and the number of waves that are over, so it may be cut off anywhere
and done again, also after the ledger was rebuilt and after training fell back to an older checkpoint. Order:
the record of samples that were passed, one ledger transaction, then the files. Files without their samples
that a crash in between leaves are known as released and are never adopted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from eyas.base.errors import ConfigError, EyasError
from eyas.base.files import fsync_folder
from eyas.base.layout import Layout
from eyas.store.commit import next_number
from eyas.store.ledger import Ledger
from eyas.store.segment_header import segment_number
from eyas.store.wave_record import SETTLED_KEY, WaveRecord, read_waves, settled_at, waves_over, write_waves
from eyas.store.waves import WavePlan, WaveRule, plan_waves


@dataclass(frozen=True)
class Settled:
    """What changed.

    Args:
        released: samples whose waves are over now and were not before.
        recalled: samples that were released and are needed again.
        segments, num_bytes: files removed.
    """

    released: int = 0
    recalled: int = 0
    segments: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class _Row:
    id: str
    state: str
    segment: str | None
    reason: str | None
    listed: int


def settle(layout: Layout, ledger: Ledger, rule: WaveRule, plan: WavePlan, position: int) -> Settled:
    """Release what is over and recall what is needed again.

    Args:
        position: waves that training is done with, by a checkpoint that is durable.

    Raises:
        ConfigError: a segment holds samples of several waves: the store was filled without a bound.
        DiskFull, EyasError, OSError: nothing that counts was changed, or it is known as released.
    """
    done = settle_ledger(layout, ledger, rule, plan, position)
    num_segments, num_bytes = sweep_released(layout, ledger)
    return replace(done, segments=num_segments, num_bytes=num_bytes)


def settle_ledger(layout: Layout, ledger: Ledger, rule: WaveRule, plan: WavePlan, position: int) -> Settled:
    """The half of `settle` that removes no file."""
    over = plan.over(position)
    rows = list(_rows(ledger))
    here = set(plan.kept).union(*(plan.waves[number].ids for number in plan.on_disk(position)))
    before = read_waves(layout)
    epoch = plan.epoch(position)
    first = _first_segment(layout, ledger, plan, epoch, before)
    dropped = _dropped_segments(layout, plan, rows, here, first)
    passed = {} if before is None else {k: why for k, why in before.passed.items() if k in over}
    passed |= {row.id: row.reason or "" for row in rows if row.state == "set_aside" and row.id in over}
    write_waves(
        layout,
        WaveRecord(
            rule, plan.digest, len(plan), plan.num_captures, dict(sorted(passed.items())), epoch, first
        ),
    )
    changes = []
    released = recalled = 0
    for row in rows:
        state = row.state
        if row.id in passed:
            state = "set_aside"
        elif row.id in over:
            state = "released" if state != "set_aside" else state
        elif state == "released" or (state == "stored" and row.segment in dropped):
            state = "pending"
        if state != row.state:
            released += state == "released"
            recalled += row.state == "released"
            changes.append((state, passed.get(row.id), row.id))
    if settled_at(ledger) != position and not (changes or dropped):
        ledger.set_meta(SETTLED_KEY, str(position))
    elif changes or dropped:
        with ledger.transaction() as connection:
            connection.executemany(
                "UPDATE samples SET state = ?1, segment = NULL, failures = iif(?2 IS NULL, 0, failures),"
                " reason = ?2, attempt = NULL WHERE id = ?3",
                changes,
            )
            connection.executemany(
                # also those that data/samples does not list any more
                "UPDATE samples SET state = 'pending', segment = NULL WHERE segment = ?",
                [(name,) for name in sorted(dropped)],
            )
            connection.execute("DELETE FROM samples WHERE listed = 0 AND state <> 'stored'")
            connection.executemany(
                "UPDATE segments SET state = 'released' WHERE name = ?", [(name,) for name in sorted(dropped)]
            )
            ledger.set_meta(SETTLED_KEY, str(position))
            ledger.event(
                "samples_released",
                {"waves_over": position, "samples": released, "recalled": recalled, "segments": len(dropped)},
            )
    return Settled(released=released, recalled=recalled)


def _first_segment(
    layout: Layout, ledger: Ledger, plan: WavePlan, epoch: int, before: WaveRecord | None
) -> int:
    """The lowest number of a segment that was captured for these waves, in this epoch.

    What was captured for others was captured in other batches: the same states, not the same bits.
    """
    if before is not None and (before.digest, before.epoch) == (plan.digest, epoch):
        return before.first_segment
    if before is None and not plan.again:
        return 0  # the store of a first run, or the record is lost: its waves are still those of the plan
    return next_number(layout.segments, ledger) if layout.segments.is_dir() else 0


def _rows(ledger: Ledger) -> Iterator[_Row]:
    with ledger.reading() as connection:
        rows = connection.execute("SELECT id, state, segment, reason, listed FROM samples").fetchall()
    return (_Row(*row) for row in rows)


def _dropped_segments(
    layout: Layout, plan: WavePlan, rows: list[_Row], here: set[str], first: int
) -> set[str]:
    """Present segments whose samples are all out of place: not kept, and not of a wave that is on disk.

    Args:
        first: segments of lower numbers are of other waves or another epoch, unless they hold kept samples.
    """
    if len(plan) <= 1:
        return set()
    kept = set(plan.kept)
    wanted: dict[str, bool] = {}
    unlisted: set[str] = set()
    for row in rows:
        if row.segment is None:
            continue
        if not row.listed:
            unlisted.add(row.segment)
            continue
        old = first > (segment_number(row.segment) or 0)
        is_wanted = row.id in (kept if old else here)
        if wanted.setdefault(row.segment, is_wanted) != is_wanted:
            raise ConfigError(
                "the store was filled without a bound: its segments hold samples of several waves",
                where=layout.segments / row.segment,
                why="a wave can be released only when its samples lie together",
                hint="take store.max_bytes out, or: eyas run --redo extract (the store is set aside)",
            )
    return {name for name, is_wanted in wanted.items() if not is_wanted} | (unlisted - wanted.keys())


def sweep_released(layout: Layout, ledger: Ledger) -> tuple[int, int]:
    """Remove the files of released segments; returns how many there were, and their bytes. Raises OSError."""
    num_segments = num_bytes = 0
    if not layout.segments.is_dir():
        return 0, 0
    present = set(os.listdir(layout.segments))
    for segment in ledger.segments(state="released"):
        if segment.name in present:
            (layout.segments / segment.name).unlink(missing_ok=True)
            num_segments += 1
            num_bytes += segment.num_bytes
    if num_segments:
        fsync_folder(layout.segments)
    return num_segments, num_bytes


def settle_rebuilt(layout: Layout, ledger: Ledger) -> Settled:
    """As `settle_ledger`, by what the folder alone says: for a ledger that was rebuilt.

    Without a readable record of waves nothing changes; the next run settles it.
    """
    record = read_waves(layout)
    if record is None:
        return Settled()
    with contextlib.suppress(EyasError):  # a bound that does not fit these samples: for the run to say
        plan = plan_waves(ledger.entries(), record.rule)
        return settle_ledger(layout, ledger, record.rule, plan, waves_over(layout, plan.digest))
    return Settled()


def recall_released(ledger: Ledger) -> int:
    """Make every released sample pending, for a run without a bound; returns how many."""
    with ledger.reading() as connection:
        query = "SELECT count(*) FROM samples WHERE listed IN (0, 1) AND state = 'released'"
        if not connection.execute(query).fetchone()[0]:
            return 0
    with ledger.transaction() as connection:
        return connection.execute(
            "UPDATE samples SET state = 'pending' WHERE listed IN (0, 1) AND state = 'released'"
        ).rowcount
