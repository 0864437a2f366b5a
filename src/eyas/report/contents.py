"""What the data and the store hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from eyas.base.files import read_json
from eyas.report.status import BROKEN
from eyas.stages.project import Project
from eyas.store.ledger import Ledger

_BINS = 30
_MAX_POINTS = 240


@dataclass(frozen=True)
class Bin:
    """``count`` samples of ``start`` to ``end - 1`` tokens."""

    start: int
    end: int
    count: int


@dataclass(frozen=True)
class DomainCounts:
    """One domain or source of the data; tokens are 0 where answers are still to come."""

    name: str
    records: int
    kept: int
    dropped: int
    samples: int
    prompts: int


@dataclass(frozen=True)
class DataView:
    """What came in, what fell out and why.

    ``drops`` counts records and samples that were left out, by reason; ``answers`` what became of the
    target's answers; ``lengths`` are of the listed samples, in tokens (of first prompts before there
    are samples).
    """

    records: int
    kept: int
    train_conversations: int
    validation_conversations: int
    samples: int
    tokens: int
    supervised_tokens: int
    truncated: int
    lengths: tuple[Bin, ...]
    domains: tuple[DomainCounts, ...]
    sources: tuple[DomainCounts, ...]
    drops: dict[str, int]
    answers: dict[str, int]
    notes: dict[str, int]


@dataclass(frozen=True)
class StorePoint:
    """Bytes and samples that were stored until ``at``."""

    at: str
    bytes: int
    samples: int


@dataclass(frozen=True)
class StoreView:
    """Segments and what they weigh.

    ``forecast_bytes`` is what the stored tokens should weigh by the recipe alone, headers not counted;
    ``verified`` counts segments that were hashed at least once after their commit. ``released`` counts
    segments that were trained on and removed; ``growth`` holds all that were captured, also those.
    """

    segments: int
    samples: int
    tokens: int
    bytes: int
    bytes_per_token: float
    forecast_bytes: int
    forecast_bytes_per_token: float
    verified: int
    growth: tuple[StorePoint, ...]
    released: int = 0


def data_view(project: Project) -> DataView | None:
    """What the data holds; None before prepare."""
    try:
        stats = dict(read_json(project.layout.stats))
        answered = dict(stats.get("regenerate") or {})
        drops = dict(stats.get("dropped") or {})
        for reason, count in dict(stats.get("samples_dropped") or {}).items():
            drops[f"sample: {reason}"] = count
        reasons = dict(answered.get("reasons") or {})
        for reason in [r for r in reasons if r.startswith(("samples dropped", "conversations ended"))]:
            drops[reason] = reasons.pop(reason)
        return DataView(
            records=int(stats["records"]),
            kept=int(stats["kept"]),
            train_conversations=int(stats["conversations"]["train"]),
            validation_conversations=int(stats["conversations"]["validation"]),
            samples=int(answered.get("samples") or sum(stats["samples"].values())),
            tokens=int(answered.get("tokens") or stats["tokens"]),
            supervised_tokens=int(answered.get("supervised_tokens") or stats["supervised_tokens"]),
            truncated=int(stats.get("samples_truncated") or 0),
            lengths=_sample_lengths(project) or _prompt_lengths(stats),
            domains=_counts(stats.get("domains")),
            sources=_counts(stats.get("sources")),
            drops=drops,
            answers=reasons,
            notes=dict(stats.get("notes") or {}),
        )
    except BROKEN:
        return None


def _sample_lengths(project: Project) -> tuple[Bin, ...]:
    with contextlib.suppress(*BROKEN), Ledger.open_read_only(project.layout.ledger) as ledger:
        with ledger.reading() as connection:
            rows = connection.execute(
                "SELECT length, count(*) FROM samples WHERE listed = 1 GROUP BY length"
            ).fetchall()
        return _bins([(int(length), int(count)) for length, count in rows])
    return ()


def _bins(rows: list[tuple[int, int]]) -> tuple[Bin, ...]:
    """Counts by length in at most 30 bins of equal width."""
    if not rows:
        return ()
    low, high = min(rows)[0], max(rows)[0]
    width = -(-(high - low + 1) // _BINS)
    counts: dict[int, int] = {}
    for length, count in rows:
        start = low + (length - low) // width * width
        counts[start] = counts.get(start, 0) + count
    last = low + (high - low) // width * width
    return tuple(Bin(s, s + width, counts.get(s, 0)) for s in range(low, last + 1, width))


def _prompt_lengths(stats: dict[str, Any]) -> tuple[Bin, ...]:
    edges = [(int(row["up_to"]), int(row["count"])) for row in stats["lengths"].get("histogram", [])]
    return tuple(Bin(edge // 2 + 1, edge + 1, count) for edge, count in edges)


def _counts(groups: Any) -> tuple[DomainCounts, ...]:
    found = [
        DomainCounts(
            name=name,
            records=int(group["records"]),
            kept=int(group["kept"]),
            dropped=sum(group["dropped"].values()),
            samples=sum(group["samples"].values()),
            prompts=int(group["prompts"]),
        )
        for name, group in dict(groups or {}).items()
    ]
    return tuple(sorted(found, key=lambda group: -group.records))


def store_view(project: Project) -> StoreView | None:
    """What the store holds, by the ledger; None before the first segment."""
    try:
        with Ledger.open_read_only(project.layout.ledger) as ledger:
            segments, released = ledger.segments(), ledger.segments(state="released")
            with ledger.reading() as connection:
                stored, supervised = connection.execute(
                    "SELECT coalesce(sum(length), 0), coalesce(sum(num_supervised), 0)"
                    " FROM samples WHERE state = 'stored'"
                ).fetchone()
        captured = sorted([*segments, *released], key=lambda segment: segment.committed_at)
        if not captured:
            return None
        resolved = project.resolved
        forecast = stored * (resolved.bytes_per_token_aux + 4) + supervised * resolved.bytes_per_token_last
        num_bytes = sum(segment.num_bytes for segment in segments)
        tokens = sum(segment.num_tokens for segment in segments)
        growth, total, samples = [], 0, 0
        step = max(1, -(-len(captured) // _MAX_POINTS))
        for index, segment in enumerate(captured):
            total, samples = total + segment.num_bytes, samples + segment.num_samples
            if (index + 1) % step == 0 or index + 1 == len(captured):
                growth.append(StorePoint(segment.committed_at, total, samples))
        return StoreView(
            segments=len(segments),
            samples=sum(segment.num_samples for segment in segments),
            tokens=tokens,
            bytes=num_bytes,
            bytes_per_token=num_bytes / max(tokens, 1),
            forecast_bytes=forecast,
            forecast_bytes_per_token=forecast / max(stored, 1),
            verified=sum(segment.verified_at is not None for segment in segments),
            growth=tuple(growth),
            released=len(released),
        )
    except BROKEN:
        return None
