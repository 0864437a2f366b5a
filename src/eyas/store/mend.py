"""Everything that a store needs to be whole again, in one call: the work behind ``eyas store repair``."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.base import files
from eyas.base.layout import Layout
from eyas.base.progress import Progress, SilentProgress
from eyas.base.seal import is_sealed
from eyas.store.doubt import unhashed_segments
from eyas.store.faults import Fault
from eyas.store.ledger import Ledger
from eyas.store.place import require_place
from eyas.store.repair import open_or_rebuild, repair, unknown_segments
from eyas.store.samples import iter_sample_index
from eyas.store.scrub import deep, quick

_WOULD = {
    "size": "set aside, its samples pending again",
    "header": "set aside, its samples pending again",
    "content": "set aside, its samples pending again",
    "recipe": "set aside, its samples pending again",
    "missing": "its samples pending again",
    "ledger": "ledger entry made anew from the file",
    "recipe_file": "set aside",
    "foreign": "set aside",
    "unknown": "adopted when every hash holds",
    "temporary": "left for eyas store gc",
    "released": "left for the next run or eyas store gc",
    "format": "left alone: a newer eyas wrote it",
}


def mend_store(
    layout: Layout, *, hashes: bool = True, again: bool = False, progress: Progress | None = None
) -> list[str]:
    """Find what is damaged, set it aside, adopt what is whole and unknown, and mend the ledger.

    The caller holds the project lock. May be cut off anywhere and called again.

    Args:
        hashes: hash segments that were not hashed since this boot and mount; otherwise only look quickly.
        again: hash those as well that were.

    Returns:
        One line for each thing done; empty when nothing was wrong.

    Raises:
        StoreNotMounted: the store's disk is not there; its samples stay stored.
    """
    progress = progress or SilentProgress()
    ledger, adoption = open_or_rebuild(layout, progress=progress)
    done = []
    if adoption is not None and (layout.segments.is_dir() or is_sealed(layout.samples)):
        segments = f"{len(adoption.segments)} segments with {adoption.num_samples} samples"
        done.append(f"ledger rebuilt: {segments}")
    with ledger:
        if moved := require_place(layout, ledger):
            progress.say(moved)
        found = find_faults(layout, ledger, hashes=hashes, again=again, progress=progress)
        faults = [fault for fault in found if fault.path != layout.samples]
        if len(faults) < len(found):
            progress.say("data/samples is damaged: eyas run sets it aside and makes it anew")
        done += repair(layout, ledger, faults, progress)
        done += _mend_ledger(layout, ledger, faults)
    if any(_breaks_ledger(layout, fault) for fault in faults):
        done += _replace_ledger(layout, progress)
    return done


def find_faults(
    layout: Layout, ledger: Ledger, *, hashes: bool, again: bool, progress: Progress
) -> list[Fault]:
    """What `mend_store` acts on."""
    if not hashes:
        return quick(layout, ledger)
    names = None
    if not again and layout.segments.is_dir():
        names = [*unhashed_segments(layout, ledger), *unknown_segments(layout, ledger)]
    return deep(layout, ledger, names=names, progress=progress)


def would_do(faults: Iterable[Fault]) -> list[tuple[Fault, str]]:
    """Each fault with what a repair does about it."""
    return [(fault, _WOULD[fault.kind]) for fault in faults]


def _breaks_ledger(layout: Layout, fault: Fault) -> bool:
    return fault.kind == "ledger" and fault.path == layout.ledger and not fault.sample_ids


def _mend_ledger(layout: Layout, ledger: Ledger, faults: Iterable[Fault]) -> list[str]:
    """List the samples anew when the ledger disagrees with data/samples."""
    differing = [f for f in faults if f.kind == "ledger" and f.path == layout.ledger and f.sample_ids]
    if not differing:
        return []
    ledger.replace_samples(iter_sample_index(layout.samples))
    return [f"ledger: {differing[0].detail}; listed anew"]


def _replace_ledger(layout: Layout, progress: Progress) -> list[str]:
    """Set a ledger whose pages are damaged aside and rebuild it."""
    for suffix in ("", "-wal", "-shm"):
        path = layout.ledger.with_name(layout.ledger.name + suffix)
        if path.exists():
            files.set_aside(path, layout.set_aside, "its pages are damaged")
    ledger, adoption = open_or_rebuild(layout, progress=progress)
    ledger.close()
    num_samples = 0 if adoption is None else adoption.num_samples
    return [f"ledger: set aside and rebuilt, {num_samples} samples stored"]
