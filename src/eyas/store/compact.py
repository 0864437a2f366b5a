"""Small segments merged into large ones; the small ones stay until `eyas.store.clear` removes them.

A new segment is written and committed like any other, read back from the disk and hashed, and only then
one ledger transaction moves the samples. A crash before it leaves a segment that holds nothing but copies;
a crash after it leaves the old files, which hold nothing but copies.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.errors import DamageFound, EyasError, SegmentDamaged
from eyas.base.layout import Layout
from eyas.base.progress import Progress, SilentProgress
from eyas.base.stop import StopFlag
from eyas.store.commit import next_number, sweep_temporaries, write_error, write_segment
from eyas.store.faults import Fault
from eyas.store.ledger import Ledger
from eyas.store.ledger_moves import SegmentUse, move_samples, segment_uses
from eyas.store.segment import SegmentReader, encode_segment, verify_segment
from eyas.store.segment_header import SegmentHeader, read_header, segment_name

TARGET_BYTES = 128 << 20
"""Size that merged segments come close to."""
SMALL_BYTES = 64 << 20
"""Segments below it are merged."""

_MAX_SAMPLES = 8192


@dataclass
class Compaction:
    """What compacting did, or would do.

    Args:
        groups: names of the segments that became one, for each new segment.
        segments: names of the new ones.
        faults: segments that could not be read; they are left alone.
    """

    groups: list[list[str]] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_samples: int = 0
    faults: list[Fault] = field(default_factory=list)


def plan_groups(
    uses: Sequence[SegmentUse], *, small_bytes: int = SMALL_BYTES, target_bytes: int = TARGET_BYTES
) -> list[list[SegmentUse]]:
    """Runs of small segments, in the order they were written, that fit one large one.

    A run of one segment is left out: copying it would gain nothing.
    """
    groups: list[list[SegmentUse]] = []
    num_bytes = num_samples = 0
    for use in uses:
        if use.is_superseded or use.num_bytes >= small_bytes:
            continue
        full = num_bytes + use.num_bytes > target_bytes or num_samples + use.num_samples > _MAX_SAMPLES
        if not groups or full:
            groups.append([])
            num_bytes = num_samples = 0
        groups[-1].append(use)
        num_bytes += use.num_bytes
        num_samples += use.num_samples
    return [group for group in groups if len(group) > 1]


def compact(
    layout: Layout,
    ledger: Ledger,
    *,
    small_bytes: int = SMALL_BYTES,
    target_bytes: int = TARGET_BYTES,
    progress: Progress | None = None,
    stop: StopFlag | None = None,
) -> Compaction:
    """Merge small segments. The caller holds the project lock and sees to the room.

    Raises:
        DiskFull, EyasError: a segment could not be written; everything committed before stays.
        Stopped: between two segments.
    """
    progress, stop = progress or SilentProgress(), stop or StopFlag()
    result = Compaction()
    groups = plan_groups(segment_uses(ledger), small_bytes=small_bytes, target_bytes=target_bytes)
    if not groups:
        return result
    sweep_temporaries(layout.segments)
    numbers = itertools.count(next_number(layout.segments, ledger))
    total = sum(use.num_bytes for group in groups for use in group)
    progress.start("compact", total=total, unit="bytes")
    for group in groups:
        stop.check()
        _merge(layout, ledger, [use.name for use in group], numbers, result)
        progress.advance(sum(use.num_bytes for use in group))
    return result


def _merge(
    layout: Layout, ledger: Ledger, names: list[str], numbers: Iterator[int], result: Compaction
) -> None:
    whole: list[str] = []
    samples = []
    recipes = set()
    for name in names:
        used = ledger.samples_of(name)
        try:
            reader = SegmentReader(layout.segments / name)
            # every checksum is checked while copying: damage must not get new, right checksums
            taken = [reader.sample(sample, check=True) for sample in used]
        except (SegmentDamaged, FileNotFoundError, KeyError) as error:
            why = error.why or error.what if isinstance(error, EyasError) else str(error)
            result.faults.append(Fault(layout.segments / name, "content", why, tuple(used)))
            continue
        whole.append(name)
        samples += taken
        recipes.add(reader.header.recipe)
    if len(whole) < 2:
        return
    if len(recipes) > 1:
        raise DamageFound(
            "segments of two recipes lie in one store",
            where=layout.segments,
            why=", ".join(sorted(recipes)),
            hint="eyas store repair",
        )
    segment = encode_segment(samples, recipes.pop())
    path = layout.segments / segment_name(next(numbers), segment.checksum)
    try:
        write_segment(path, segment)
    except OSError as error:
        raise write_error(layout.segments, error, segment.num_bytes) from error
    header = _read_back(path)
    sizes = [(sample.id, len(sample.tokens)) for sample in samples]
    move_samples(ledger, path.name, header.num_bytes, header.recipe, sizes, whole)
    result.groups.append(whole)
    result.segments.append(path.name)
    result.num_bytes += segment.num_bytes
    result.num_samples += len(samples)


def _read_back(path: Path) -> SegmentHeader:
    """The header of a segment that was just written, after every byte was read from the disk and hashed."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    header = read_header(path)
    if faults := verify_segment(path, header):
        raise SegmentDamaged(
            "a segment that was just written reads back differently",
            where=path,
            why=next(iter(faults.values())),
            hint="check the disk (dmesg, smartctl), then: eyas store repair",
        )
    return header
