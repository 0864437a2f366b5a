"""Mending a store: damaged segments set aside, unknown ones adopted, a lost ledger rebuilt.

Nothing is deleted. Every function may be interrupted anywhere and called again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base import files
from eyas.base.clock import boot_id
from eyas.base.errors import DamageFound, FormatTooNew, SegmentDamaged
from eyas.base.layout import Layout
from eyas.base.progress import Progress, SilentProgress
from eyas.base.seal import is_sealed
from eyas.base.units import counted
from eyas.store.faults import Fault
from eyas.store.ledger import Ledger, SegmentRecord, StoredSize
from eyas.store.ledger_history import Event
from eyas.store.place import mount_identity
from eyas.store.recipe import read_store_recipe
from eyas.store.release import settle_rebuilt
from eyas.store.samples import iter_sample_index
from eyas.store.segment import SegmentReader, verify_segment
from eyas.store.segment_header import SegmentHeader, read_header, segment_number
from eyas.store.todos import TODO_EVENT, restore_todo

_SET_ASIDE_KINDS = frozenset({"size", "header", "content", "recipe"})


@dataclass
class Adoption:
    """What `adopt_unknown` did.

    Args:
        segments: names that the ledger has now.
        num_samples: samples that are stored now and were not before.
        duplicates: samples in them that another segment held already.
        faults: unknown segments that were not adopted, and why.
    """

    segments: list[str] = field(default_factory=list)
    num_samples: int = 0
    duplicates: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def set_aside_segment(layout: Layout, ledger: Ledger, name: str, reason: str) -> list[str]:
    """Move a segment out of the store and make its samples pending again; returns those.

    A segment whose file is gone is only noted. Raises OSError when the file cannot be moved.
    """
    path = layout.segments / name
    # The file goes first: a crash in between leaves a missing segment, which the next scrub names.
    place = files.set_aside(path, layout.set_aside, reason) if path.exists() else None
    ids = ledger.release_segment(name)
    ledger.event(
        "segment_set_aside",
        {"segment": name, "reason": reason, "samples": len(ids), "to": str(place) if place else None},
    )
    return ids


def unknown_segments(layout: Layout, ledger: Ledger) -> list[str]:
    """Names of segment files in the folder that the ledger does not have, sorted.

    One that is released is known: it is removed by the next run, and never taken in again.
    """
    if not layout.segments.is_dir():
        return []
    known = {segment.name for state in ("present", "released") for segment in ledger.segments(state=state)}
    names = (path.name for path in layout.segments.iterdir() if segment_number(path.name) is not None)
    return sorted(name for name in names if name not in known)


def adopt_unknown(
    layout: Layout, ledger: Ledger, recipe_hash: str | None = None, progress: Progress | None = None
) -> Adoption:
    """Verify each segment that the ledger does not have, and take it in when it is whole.

    Args:
        recipe_hash: the recipe that segments must carry; by default that of store.json, and where there
            is none, that of the first segment.
    """
    progress = progress or SilentProgress()
    names = unknown_segments(layout, ledger)
    adoption = Adoption()
    if not names:
        return adoption
    recipe_hash = recipe_hash or _recorded_recipe(layout, ledger)
    progress.start("adopt segments", total=len(names), unit="segments")
    for name in names:
        path = layout.segments / name
        header, fault = _whole_header(path, recipe_hash)
        if header is None or fault is not None:
            adoption.faults += [fault] if fault is not None else []
            continue
        recipe_hash = recipe_hash or header.recipe
        commit = ledger.commit_segment(name, header.num_bytes, header.recipe, list(_sizes(path)))
        ledger.note_verified([name], boot_id(), mount_identity(layout.segments))
        adoption.segments.append(name)
        adoption.num_samples += len(commit.stored)
        adoption.duplicates += commit.duplicates
        progress.advance(1)
    ledger.event(
        "segments_adopted",
        {
            "segments": adoption.segments,
            "samples": adoption.num_samples,
            "duplicates": len(adoption.duplicates),
            "refused": [fault.path.name for fault in adoption.faults],
        },
    )
    return adoption


def _recorded_recipe(layout: Layout, ledger: Ledger) -> str | None:
    try:
        return read_store_recipe(layout.store_recipe).hash
    except (FileNotFoundError, DamageFound):
        recipes = {segment.recipe for segment in ledger.segments()}
        return recipes.pop() if len(recipes) == 1 else None


def _whole_header(path: Path, recipe_hash: str | None) -> tuple[SegmentHeader | None, Fault | None]:
    try:
        header = read_header(path)
        if recipe_hash is not None and header.recipe != recipe_hash:
            return None, Fault(path, "recipe", f"captured with recipe {header.recipe}, not {recipe_hash}")
        faults = verify_segment(path, header)
    except FileNotFoundError:
        return None, None
    except FormatTooNew as error:
        return None, Fault(path, "format", error.what)
    except SegmentDamaged as error:
        return None, Fault(path, "header", error.why or error.what)
    except OSError as error:
        return None, Fault(path, "header", str(error))
    if faults:
        sample, why = next(iter(faults.items()))
        return None, Fault(path, "content", f"{counted(len(faults), 'sample')} damaged; {sample}: {why}")
    return header, None


def _sizes(path: Path) -> Iterator[StoredSize]:
    reader = SegmentReader(path)
    for sample in map(reader.sample, reader.ids):
        yield StoredSize(sample.id, len(sample.tokens), sample.num_supervised)


def disagreement(
    header: SegmentHeader, record: SegmentRecord, ids: tuple[str, ...], ledger: Ledger
) -> str | None:
    """What the ledger says otherwise than a segment's checked header; None when they agree."""
    if header.recipe != record.recipe:
        return f"the ledger says recipe {record.recipe}, the file {header.recipe}"
    if strangers := set(ids) - set(header.ids):
        return f"the ledger has {len(strangers)} samples in it that are not there ({min(strangers)})"
    lost = [sample for sample in header.ids if ledger.state_of(sample) != "stored"]
    if lost:
        return f"the ledger does not count {len(lost)} of its samples as stored ({min(lost)})"
    return None


def repair(
    layout: Layout, ledger: Ledger, faults: Iterable[Fault], progress: Progress | None = None
) -> list[str]:
    """Mend what a scrub found; returns one line per thing done.

    Damaged segments are set aside and their samples pending again; a segment on which ledger and file
    disagree is forgotten and adopted anew; unknown whole segments are adopted; foreign files and a
    store.json that cannot be read are moved away. A ledger that cannot be read is the business of
    `open_or_rebuild`, a newer format nobody's.
    """
    done: list[str] = []
    handled: set[Path] = set()
    for fault in faults:
        if fault.path in handled:
            continue
        name = fault.path.name
        if fault.kind in _SET_ASIDE_KINDS:
            ids = set_aside_segment(layout, ledger, name, f"{fault.kind}: {fault.detail}")
            done.append(f"{name}: set aside, {counted(len(ids), 'sample')} pending again ({fault.detail})")
        elif fault.kind == "missing":
            ids = set_aside_segment(layout, ledger, name, fault.detail)
            done.append(f"{name}: missing, {counted(len(ids), 'sample')} pending again")
        elif fault.kind == "ledger" and fault.path.parent == layout.segments:
            ledger.release_segment(name)
            done.append(f"{name}: ledger entry dropped, to be adopted anew ({fault.detail})")
        elif fault.kind == "foreign" or (fault.kind == "recipe_file" and fault.path.exists()):
            place = files.set_aside(fault.path, layout.set_aside, fault.detail)
            done.append(f"{name}: moved to {place}")
        else:
            continue
        handled.add(fault.path)
    adoption = adopt_unknown(layout, ledger, progress=progress)
    if handled and _release_disagreeing(layout, ledger):
        again = adopt_unknown(layout, ledger, progress=progress)
        adoption.segments += again.segments
        adoption.num_samples += again.num_samples
    if adoption.segments:
        done.append(f"{len(adoption.segments)} segments adopted, {adoption.num_samples} samples stored")
    for fault in adoption.faults:
        if fault.kind in _SET_ASIDE_KINDS:
            set_aside_segment(layout, ledger, fault.path.name, f"{fault.kind}: {fault.detail}")
            done.append(f"{fault.path.name}: set aside, not adopted ({fault.detail})")
    return done


def _release_disagreeing(layout: Layout, ledger: Ledger) -> int:
    """Forget segments whose samples became free when another one was released; returns how many."""
    num_released = 0
    for record in ledger.segments():
        try:
            header = read_header(layout.segments / record.name)
        except (SegmentDamaged, FormatTooNew, FileNotFoundError):
            continue  # a fault of its own, for the next scrub
        if disagreement(header, record, tuple(ledger.samples_of(record.name)), ledger):
            ledger.release_segment(record.name)
            num_released += 1
    return num_released


def rebuild_ledger(
    layout: Layout, ledger: Ledger, recipe_hash: str | None = None, progress: Progress | None = None
) -> Adoption:
    """Fill a ledger from data/samples, logs/*/events.jsonl and the segments; safe on one that is only old.

    Stages are not restored: they find out themselves what is done.

    Raises:
        DamageFound: data/samples cannot be read.
    """
    if is_sealed(layout.samples):
        ledger.replace_samples(iter_sample_index(layout.samples))
    if not ledger.attempts():
        for number, events in logged_events(layout):
            ledger.restore_attempt(number, events[0].at if events else "unknown")
            ledger.replay(events)
            for event in events:
                if event.kind == TODO_EVENT:
                    restore_todo(ledger, event)
    adoption = adopt_unknown(layout, ledger, recipe_hash, progress)
    settle_rebuilt(layout, ledger)
    ledger.event("ledger_rebuilt", {"segments": len(adoption.segments), "samples": adoption.num_samples})
    return adoption


def logged_events(layout: Layout) -> Iterator[tuple[int, list[Event]]]:
    """Events of each attempt as its log holds them, oldest attempt first; torn lines are left out."""
    for folder in sorted(layout.logs.glob("attempt-*")):
        number = folder.name.removeprefix("attempt-")
        if folder.is_dir() and not folder.is_symlink() and number.isdigit():
            yield int(number), list(_read_events(folder / "events.jsonl"))


def _read_events(path: Path) -> Iterator[Event]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
            yield Event(str(fields["at"]), fields["attempt"], str(fields["kind"]), dict(fields["detail"]))
        except (ValueError, KeyError, TypeError):
            continue


def set_ledger_aside(layout: Layout, why: str | None) -> None:
    """Move the ledger away, with what SQLite keeps beside it; it must not be open."""
    for suffix in ("", "-wal", "-shm"):
        path = layout.ledger.with_name(layout.ledger.name + suffix)
        if path.exists():
            files.set_aside(path, layout.set_aside, f"damaged ledger: {why}")


def open_or_rebuild(
    layout: Layout, recipe_hash: str | None = None, progress: Progress | None = None
) -> tuple[Ledger, Adoption | None]:
    """The project's ledger for writing; when it is lost or damaged, a rebuilt one.

    A damaged ledger is set aside first. The caller holds the project lock.

    Returns:
        The ledger, and what the rebuild took in when there was one.

    Raises:
        FormatTooNew, DiskFull: as `Ledger.open`.
    """
    try:
        ledger = Ledger.open(layout.ledger, create=False) if layout.ledger.exists() else None
    except DamageFound as error:
        set_ledger_aside(layout, error.why)
        ledger = None
    if ledger is not None:
        return ledger, None
    ledger = Ledger.open(layout.ledger)
    return ledger, rebuild_ledger(layout, ledger, recipe_hash, progress)
