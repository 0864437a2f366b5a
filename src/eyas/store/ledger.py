"""The ledger: the state of every sample and segment; standard library only.

A sample is ``pending``, ``in_flight`` (leased by an attempt), ``stored`` in one segment, ``failed``
(to be tried again), ``set_aside`` (failed too often) or ``released`` (trained on, no longer on disk).
Only listed samples are counted: those that data/samples holds now. One writer at a time is the caller's
duty (the project lock).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from eyas.base.clock import utc_now_text
from eyas.base.errors import DataError
from eyas.store.entry import SampleEntry
from eyas.store.ledger_history import Event, LedgerHistory

SAMPLE_STATES = ("pending", "in_flight", "stored", "failed", "set_aside", "released")
DOUBTFUL = "doubtful"
"""Stands for the boot under which a segment was verified, when its hashes were found wrong."""

_ORDERS = {"length": "length, id", "id": "id"}
_TO_DO = "listed = 1 AND state IN ('pending', 'failed')"
_RETRY = (
    "UPDATE samples SET state = 'pending', failures = 0, reason = NULL WHERE state IN ('failed', 'set_aside')"
)


class StoredSize(NamedTuple):
    """A sample as a segment holds it."""

    id: str
    length: int
    num_supervised: int


class StateCount(NamedTuple):
    """How many samples are in a state, and their tokens."""

    samples: int
    tokens: int


class FailedSample(NamedTuple):
    """A sample that failed: so often, last for this reason."""

    id: str
    state: str
    failures: int
    reason: str


@dataclass(frozen=True)
class SegmentRecord:
    """What the ledger knows of a segment.

    Args:
        state: ``present``, ``set_aside`` when it was moved away, or ``released`` when its samples are over.
        verified_at: when every hash was last checked, under that boot and mount; None when never.
    """

    name: str
    num_bytes: int
    num_samples: int
    num_tokens: int
    recipe: str
    committed_at: str
    verified_at: str | None
    verified_boot: str | None
    verified_mount: str | None
    state: str


@dataclass(frozen=True)
class Commit:
    """What `Ledger.commit_segment` changed.

    Args:
        stored: samples that are stored now and were not before.
        duplicates: samples that another segment held already; that one keeps them.
        unlisted: samples among ``stored`` that data/samples does not hold.
    """

    stored: tuple[str, ...]
    duplicates: tuple[str, ...]
    unlisted: tuple[str, ...]


class Ledger(LedgerHistory):
    """Samples and segments, on top of attempts, stages, events and todos."""

    def add_samples(self, entries: Iterable[SampleEntry]) -> int:
        """List samples; those already known keep their state. Returns how many were new.

        Reads ``entries`` as a stream and writes one transaction.
        """
        with self.transaction() as connection:
            before = connection.execute("SELECT count(*) FROM samples").fetchone()[0]
            connection.executemany(
                "INSERT INTO samples (id, length, num_supervised, split, source) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET listed = 1, length = excluded.length,"
                " num_supervised = excluded.num_supervised, split = excluded.split, source = excluded.source",
                entries,
            )
            after = connection.execute("SELECT count(*) FROM samples").fetchone()[0]
        return int(after) - int(before)

    def replace_samples(self, entries: Iterable[SampleEntry]) -> int:
        """List exactly these samples: others that are stored become unlisted, the rest is forgotten.

        Returns how many were new.
        """
        with self.transaction() as connection:
            connection.execute("UPDATE samples SET listed = 0 WHERE listed = 1")
            num_new = self.add_samples(entries)
            connection.execute("DELETE FROM samples WHERE listed = 0 AND state <> 'stored'")
        return num_new

    def counts(self) -> dict[str, StateCount]:
        """Samples and tokens in each state; every state is there, and they add up to all listed samples."""
        counts = dict.fromkeys(SAMPLE_STATES, StateCount(0, 0))
        with self.reading() as connection:
            for state, samples, tokens in connection.execute(
                "SELECT state, count(*), sum(length) FROM samples WHERE listed = 1 GROUP BY state"
            ):
                counts[state] = StateCount(samples, tokens)
        return counts

    def num_captured(self) -> int:
        """Listed samples that were captured: stored now, or released since."""
        counts = self.counts()
        return counts["stored"].samples + counts["released"].samples

    def pending(self, order: Literal["length", "id"] = "length") -> list[str]:
        """Ids of the samples that are left to do: pending ones, and failed ones that may be tried again."""
        return [sample for sample, _ in self.pending_lengths(order)]

    def pending_lengths(self, order: Literal["length", "id"] = "length") -> list[tuple[str, int]]:
        """As `pending`, each with its number of tokens."""
        query = f"SELECT id, length FROM samples WHERE listed = 1 AND state = ? ORDER BY {_ORDERS[order]}"
        with self.reading() as connection:
            # State by state the index has the order already; a sort of a million rows takes seconds.
            pending = connection.execute(query, ("pending",)).fetchall()
            failed = connection.execute(query, ("failed",)).fetchall()
        if not failed:
            return pending
        return sorted(pending + failed, key=lambda row: (row[1], row[0]) if order == "length" else row[0])

    def lease(self, ids: Iterable[str], attempt: int) -> list[str]:
        """Turn samples that are left to do into in-flight ones of ``attempt``; returns those that were."""
        leased = []
        with self.transaction() as connection:
            for sample in ids:
                changed = connection.execute(
                    f"UPDATE samples SET state = 'in_flight', attempt = ? WHERE id = ? AND {_TO_DO}",
                    (attempt, sample),
                )
                if changed.rowcount:
                    leased.append(sample)
        return leased

    def release_leases(self) -> int:
        """Give back every sample in flight, as the start of an attempt does; returns how many."""
        with self.transaction() as connection:
            return connection.execute(
                # both values are named so that the index finds the few among a million
                "UPDATE samples SET state = iif(failures > 0, 'failed', 'pending')"
                " WHERE listed IN (0, 1) AND state = 'in_flight'"
            ).rowcount

    def commit_segment(
        self, name: str, num_bytes: int, recipe: str, samples: Sequence[StoredSize | tuple[str, int, int]]
    ) -> Commit:
        """Note a segment that is durable on disk and turn its samples into stored ones: one transaction.

        A sample that another segment holds stays with that one. A sample that data/samples does not
        hold is known as unlisted.

        Args:
            name: file name of the segment.
            samples: id, number of tokens and of supervised tokens of each.

        Raises:
            DataError: the ledger has a segment of this name.
        """
        stored, duplicates, unlisted = [], [], []
        with self.transaction() as connection:
            known = connection.execute("SELECT state FROM segments WHERE name = ?", (name,)).fetchone()
            if known is not None and known[0] == "present":
                raise DataError("the ledger has a segment of this name", where=name)
            connection.execute(
                "INSERT OR REPLACE INTO segments (name, bytes, num_samples, num_tokens, recipe, committed_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (name, num_bytes, len(samples), sum(size[1] for size in samples), recipe, utc_now_text()),
            )
            for sample, length, num_supervised in samples:
                row = connection.execute(
                    "SELECT state, listed FROM samples WHERE id = ?", (sample,)
                ).fetchone()
                if row is not None and row[0] == "stored":
                    duplicates.append(sample)
                    continue
                stored.append(sample)
                if row is None or not row[1]:
                    unlisted.append(sample)
                connection.execute(
                    "INSERT INTO samples (id, length, num_supervised, split, source, state, segment, listed)"
                    " VALUES (?, ?, ?, '', '', 'stored', ?, 0)"
                    " ON CONFLICT (id) DO UPDATE SET state = 'stored', segment = excluded.segment",
                    (sample, length, num_supervised, name),
                )
        return Commit(tuple(stored), tuple(duplicates), tuple(unlisted))

    def release_segment(self, name: str) -> list[str]:
        """Note that a segment is set aside and turn its samples back into pending ones; returns those."""
        with self.transaction() as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM samples WHERE segment = ?", (name,))]
            connection.execute(
                "UPDATE samples SET state = 'pending', segment = NULL, failures = 0, reason = NULL"
                " WHERE segment = ?",
                (name,),
            )
            connection.execute("DELETE FROM samples WHERE listed = 0 AND state <> 'stored'")
            connection.execute("UPDATE segments SET state = 'set_aside' WHERE name = ?", (name,))
        return ids

    def fail_sample(self, sample: str, reason: str, attempt: int | None, limit: int) -> str:
        """Count a failure; the sample is set aside when it is the ``limit``-th. Returns the new state.

        Raises:
            DataError: the ledger does not know the sample, or it is stored.
        """
        with self.transaction() as connection:
            row = connection.execute("SELECT state, failures FROM samples WHERE id = ?", (sample,)).fetchone()
            if row is None or row[0] == "stored":
                raise DataError("only a sample that is not stored can fail", where=sample)
            state = "set_aside" if row[1] + 1 >= limit else "failed"
            connection.execute(
                "UPDATE samples SET state = ?, failures = failures + 1, reason = ?, attempt = ? WHERE id = ?",
                (state, reason, attempt, sample),
            )
            connection.execute(
                "INSERT INTO failures VALUES (?, ?, ?, ?)", (sample, attempt, reason, utc_now_text())
            )
            self.event("sample_failed", {"sample": sample, "reason": reason, "state": state}, attempt)
        return state

    def set_aside_sample(self, sample: str, reason: str) -> None:
        """Set a sample aside at once. Raises DataError when it is unknown or stored."""
        with self.transaction() as connection:
            changed = connection.execute(
                "UPDATE samples SET state = 'set_aside', reason = ? WHERE id = ? AND state <> 'stored'",
                (reason, sample),
            )
            if not changed.rowcount:
                raise DataError("only a sample that is not stored can be set aside", where=sample)
            self.event("sample_set_aside", {"sample": sample, "reason": reason})

    def retry_failed(self) -> int:
        """Make failed and set-aside samples pending with no failures counted; returns how many."""
        with self.transaction() as connection:
            num_samples = connection.execute(_RETRY).rowcount
            self.event("retry_failed", {"samples": num_samples})
        return num_samples

    def failed_samples(self) -> list[FailedSample]:
        """Listed samples that failed or are set aside, most failures first."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT id, state, failures, coalesce(reason, '') FROM samples"
                " WHERE listed = 1 AND state IN ('failed', 'set_aside') ORDER BY failures DESC, id"
            ).fetchall()
        return [FailedSample(*row) for row in rows]

    def stored(self, split: str | None = None, *, listed_only: bool = True) -> Iterator[tuple[str, str]]:
        """Stored samples as (id, segment) by id.

        Args:
            split: only this one.
            listed_only: leave out samples that data/samples no longer holds.
        """
        conditions = ["state = 'stored'"]
        conditions += ["listed = 1"] if listed_only else []
        conditions += ["split = :split"] if split is not None else []
        query = f"SELECT id, segment FROM samples WHERE {' AND '.join(conditions)} ORDER BY id"
        with self.reading() as connection:
            rows = connection.execute(query, {"split": split}).fetchall()
        yield from rows

    def entries(self) -> Iterator[SampleEntry]:
        """All listed samples by id."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT id, length, num_supervised, split, source FROM samples WHERE listed = 1 ORDER BY id"
            ).fetchall()
        yield from map(SampleEntry._make, rows)

    def replay(self, events: Iterable[Event]) -> None:
        """Note events of earlier attempts and what they say of samples, as the rebuild of a ledger does.

        Only samples that are left to do change: what is stored meanwhile is stored.
        """
        events = list(events)
        with self.transaction() as connection:
            for event in events:
                sample, reason = event.detail.get("sample"), str(event.detail.get("reason", ""))
                if event.kind == "sample_failed":
                    connection.execute(
                        "UPDATE samples SET state = iif(? = 'set_aside', 'set_aside', 'failed'), reason = ?,"
                        f" attempt = ?, failures = failures + 1 WHERE id = ? AND {_TO_DO}",
                        (event.detail.get("state"), reason, event.attempt, sample),
                    )
                    connection.execute(
                        "INSERT INTO failures VALUES (?, ?, ?, ?)", (sample, event.attempt, reason, event.at)
                    )
                elif event.kind == "sample_set_aside":
                    connection.execute(
                        f"UPDATE samples SET state = 'set_aside', reason = ? WHERE id = ? AND {_TO_DO}",
                        (reason, sample),
                    )
                elif event.kind == "retry_failed":
                    connection.execute(_RETRY)
            self.insert_events(connection, events)

    def state_of(self, sample: str) -> str | None:
        """The state of one sample; None when the ledger does not know it."""
        with self.reading() as connection:
            row = connection.execute("SELECT state FROM samples WHERE id = ?", (sample,)).fetchone()
        return None if row is None else str(row[0])

    def segments(self, *, state: str | None = "present") -> list[SegmentRecord]:
        """Segments by name; ``state`` None gives those set aside and released as well."""
        where = "" if state is None else "WHERE state = :state"
        with self.reading() as connection:
            rows = connection.execute(
                f"SELECT * FROM segments {where} ORDER BY name", {"state": state}
            ).fetchall()
        return [SegmentRecord(*row) for row in rows]

    def samples_of(self, segment: str) -> list[str]:
        """Ids of the samples that are stored in a segment."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT id FROM samples WHERE segment = ? ORDER BY id", (segment,)
            ).fetchall()
        return [row[0] for row in rows]

    def stored_counts(self) -> dict[str, int]:
        """How many samples are stored in each segment that holds any."""
        with self.reading() as connection:
            return dict(
                connection.execute(
                    "SELECT segment, count(*) FROM samples WHERE segment IS NOT NULL GROUP BY segment"
                ).fetchall()
            )

    def note_verified(self, names: Sequence[str], boot: str, mount: str) -> None:
        """Note that every hash of these segments was checked just now: one transaction."""
        now = utc_now_text()
        with self.transaction() as connection:
            connection.executemany(
                "UPDATE segments SET verified_at = ?, verified_boot = ?, verified_mount = ? WHERE name = ?",
                [(now, boot, mount, name) for name in names],
            )

    def note_doubtful(self, name: str) -> None:
        """Note that a segment was found damaged: whatever was verified before does not count."""
        with self.transaction() as connection:
            connection.execute(
                "UPDATE segments SET verified_at = NULL, verified_boot = ?, verified_mount = NULL"
                " WHERE name = ?",
                (DOUBTFUL, name),
            )

    def unverified(self, boot: str, mount: str) -> list[str]:
        """Present segments whose hashes were not checked since this boot and mount."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT name FROM segments WHERE state = 'present'"
                " AND (verified_at IS NULL OR verified_boot <> ? OR verified_mount <> ?) ORDER BY name",
                (boot, mount),
            ).fetchall()
        return [row[0] for row in rows]
