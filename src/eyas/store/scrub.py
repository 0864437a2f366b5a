"""Looking for damage in the store: quick by names, sizes and headers; deep by every hash.

A scrub changes no file. What it finds goes to `eyas.store.repair`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from eyas.base.clock import boot_id
from eyas.base.errors import EyasError, FormatTooNew, SegmentDamaged
from eyas.base.files import TEMPORARY_SUFFIX
from eyas.base.layout import Layout
from eyas.base.progress import Progress, SilentProgress
from eyas.base.seal import is_sealed
from eyas.store.faults import Fault
from eyas.store.ledger import Ledger, SegmentRecord
from eyas.store.place import mount_identity
from eyas.store.recipe import read_store_recipe
from eyas.store.repair import (
    Adoption,
    adopt_unknown,
    disagreement,
    open_or_rebuild,
    rebuild_ledger,
    repair,
    set_aside_segment,
)
from eyas.store.samples import iter_sample_index
from eyas.store.segment import verify_segment
from eyas.store.segment_header import SegmentHeader, read_header, read_recipe, segment_number

__all__ = [
    "Adoption",
    "Fault",
    "adopt_unknown",
    "deep",
    "open_or_rebuild",
    "quick",
    "rebuild_ledger",
    "repair",
    "set_aside_segment",
]


_NOTE_SECONDS = 1.0


def quick(layout: Layout, ledger: Ledger | None = None) -> list[Fault]:
    """Ledger against folder, sizes, and every segment's header, name and recipe; reads no tensor.

    Args:
        ledger: an open one; by default the project's is opened read-only.
    """
    faults, _ = _examine(layout, ledger)
    return faults


def deep(
    layout: Layout,
    ledger: Ledger | None = None,
    *,
    names: Iterable[str] | None = None,
    num_workers: int = 2,
    from_disk: bool = True,
    progress: Progress | None = None,
) -> list[Fault]:
    """All of `quick`, then every tensor's hash and every sample's identity, the ledger's own pages, and
    the ledger against data/samples.

    Args:
        ledger: open for writing, to note in it which segments were whole; otherwise nothing is noted.
        names: only these segments' tensors.
        from_disk: ask the system to drop its cached pages of a segment first: what the cache returns
            says nothing of the disk.
        progress: advances in bytes.
    """
    progress = progress or SilentProgress()
    faults, whole = _examine(layout, ledger)
    wanted = None if names is None else set(names)
    chosen = {path: size for path, size in whole.items() if wanted is None or path.name in wanted}
    boot = boot_id()
    mount = mount_identity(layout.segments) if layout.segments.is_dir() else ""
    progress.start("verify", total=sum(chosen.values()), unit="bytes")
    with ThreadPoolExecutor(num_workers, thread_name_prefix="eyas-scrub") as pool:
        tasks: dict[Path, Future[dict[str, str]]] = {
            path: pool.submit(_hash_segment, path, from_disk) for path in chosen
        }
        notes = None if ledger is None else _Notes(ledger, boot, mount)
        try:
            for path, task in tasks.items():
                found = _content_fault(path, task)
                faults += [found] if found is not None else []
                if notes is not None:
                    notes.add(path.name, found is None)
                progress.advance(chosen[path])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            if notes is not None:
                notes.write()
    return faults + _ledger_faults(layout, ledger)


class _Notes:
    """Notes which segments were whole, some at a time: each note is a synced transaction.

    A scrub that is cut off hashes again what the last second or so was spent on.
    """

    def __init__(self, ledger: Ledger, boot: str, mount: str) -> None:
        self._ledger, self._boot, self._mount = ledger, boot, mount
        self._whole: list[str] = []
        self._written_at = time.monotonic()

    def add(self, name: str, is_whole: bool) -> None:
        if not is_whole:
            self._ledger.note_doubtful(name)
            return
        self._whole.append(name)
        if time.monotonic() - self._written_at >= _NOTE_SECONDS:
            self.write()

    def write(self) -> None:
        if self._whole:
            self._ledger.note_verified(self._whole, self._boot, self._mount)
        self._whole, self._written_at = [], time.monotonic()


def _hash_segment(path: Path, from_disk: bool) -> dict[str, str]:
    header = read_header(path)  # read again: the headers of a million samples do not fit in memory
    if from_disk and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return verify_segment(path, header)


def _content_fault(path: Path, task: Future[dict[str, str]]) -> Fault | None:
    try:
        found = task.result()
    except OSError as error:
        return Fault(path, "content", str(error))
    except EyasError as error:
        return Fault(path, "header", error.why or error.what)
    if not found:
        return None
    sample, why = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return Fault(path, "content", f"sample {sample}: {why}{more}", tuple(found))


def _examine(layout: Layout, ledger: Ledger | None) -> tuple[list[Fault], dict[Path, int]]:
    """The quick faults, and the sizes of the segments whose headers are whole."""
    if ledger is not None:
        return _examine_with(layout, ledger)
    if not layout.ledger.exists():
        if not layout.segments.is_dir():
            return [], {}
        fault = Fault(layout.ledger, "ledger", "there is no ledger")
        faults, whole = _examine_with(layout, None)
        return [fault, *faults], whole
    try:
        with Ledger.open_read_only(layout.ledger) as opened:
            return _examine_with(layout, opened)
    except EyasError as error:
        fault = Fault(layout.ledger, "ledger", error.why or error.what)
        faults, whole = _examine_with(layout, None)
        return [fault, *faults], whole


def _examine_with(layout: Layout, ledger: Ledger | None) -> tuple[list[Fault], dict[Path, int]]:
    known = {} if ledger is None else {segment.name: segment for segment in ledger.segments()}
    released = set() if ledger is None else {segment.name for segment in ledger.segments(state="released")}
    used = {} if ledger is None else ledger.stored_counts()
    recipe_hash, faults = _store_recipe(layout, bool(known))
    whole: dict[Path, int] = {}
    paths = sorted(layout.segments.iterdir()) if layout.segments.is_dir() else []
    present = set()
    for path in paths:
        if path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX):
            faults.append(Fault(path, "temporary", "left by a writer that was killed"))
        elif segment_number(path.name) is None or not path.is_file():
            faults.append(Fault(path, "foreign", "not a file that eyas writes here"))
        elif path.name in released:
            faults.append(Fault(path, "released", "trained on and released; its removal was cut off"))
        else:
            present.add(path.name)
            record = known.get(path.name)
            if record is not None and _agrees(path, record, used.get(path.name, 0), recipe_hash):
                whole[path] = record.num_bytes
                continue
            found, header = _examine_segment(path, record, ledger, recipe_hash)
            faults += found
            if header is not None:
                whole[path] = header.num_bytes
    for name in sorted(known.keys() - present):
        ids = () if ledger is None else tuple(ledger.samples_of(name))
        faults.append(Fault(layout.segments / name, "missing", "in the ledger, not in the folder", ids))
    return faults, whole


def _agrees(path: Path, record: SegmentRecord, num_used: int, recipe_hash: str | None) -> bool:
    """Whether header, name, length, recipe and number of samples are the committed ones.

    The samples of a commit are noted in its one transaction: where all of them are still there, they are
    the ones in the header. That spares a resume from taking a million headers apart.
    """
    if num_used != record.num_samples:
        return False
    recipe = read_recipe(path, record.num_bytes)
    return recipe is not None and recipe == record.recipe and recipe_hash in (None, recipe)


def _store_recipe(layout: Layout, has_segments: bool) -> tuple[str | None, list[Fault]]:
    try:
        return read_store_recipe(layout.store_recipe).hash, []
    except FileNotFoundError:
        detail = "store.json is missing"
        return None, [Fault(layout.store_recipe, "recipe_file", detail)] if has_segments else []
    except EyasError as error:
        return None, [Fault(layout.store_recipe, "recipe_file", error.why or error.what)]


def _examine_segment(
    path: Path, record: SegmentRecord | None, ledger: Ledger | None, recipe_hash: str | None
) -> tuple[list[Fault], SegmentHeader | None]:
    ids = tuple(ledger.samples_of(path.name)) if ledger is not None and record is not None else ()
    num_bytes = path.stat().st_size
    if record is not None and num_bytes != record.num_bytes:
        detail = f"{num_bytes:,} bytes long, committed with {record.num_bytes:,}"
        return [Fault(path, "size", detail, ids)], None
    try:
        header = read_header(path)
    except SegmentDamaged as error:
        return [Fault(path, "header", error.why or error.what, ids)], None
    except FormatTooNew as error:
        return [Fault(path, "format", error.what, ids)], None
    if recipe_hash is not None and header.recipe != recipe_hash:
        return [Fault(path, "recipe", f"captured with recipe {header.recipe}, not {recipe_hash}", ids)], None
    if ledger is None:
        return [], header
    if record is None:
        return [Fault(path, "unknown", "whole, but not in the ledger")], None
    differs = disagreement(header, record, ids, ledger)
    return ([Fault(path, "ledger", differs, ids)] if differs else []), header


def _ledger_faults(layout: Layout, ledger: Ledger | None) -> list[Fault]:
    """Damage in the ledger's own pages, and samples on which it disagrees with data/samples."""
    if ledger is None:
        if not layout.ledger.exists():
            return []
        try:
            with Ledger.open_read_only(layout.ledger) as opened:
                return _ledger_faults(layout, opened)
        except EyasError:
            return []  # named by the quick part already
    faults = [Fault(ledger.path, "ledger", detail) for detail in ledger.integrity_faults()]
    if faults or not is_sealed(layout.samples):
        return faults
    try:
        expected = {entry.id: entry for entry in iter_sample_index(layout.samples)}
    except EyasError as error:
        return [Fault(layout.samples, "content", error.why or error.what)]
    differing, entries = [], list(ledger.entries())
    if not entries:
        return faults  # nothing was captured yet, so nothing is listed
    for entry in entries:
        if expected.pop(entry.id, None) != entry:
            differing.append(entry.id)
    differing += expected
    if differing:
        detail = f"{len(differing)} samples differ from data/samples"
        faults.append(Fault(ledger.path, "ledger", detail, tuple(sorted(differing))))
    return faults
