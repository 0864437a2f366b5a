"""What may be removed from a project because it is provably held elsewhere or was never finished.

Four kinds, and nothing else: segments whose every sample another whole segment holds, released segments whose
removal was cut off, temporary files of processes that are gone, and checkpoints beyond those that are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.base.errors import EyasError, FormatTooNew, SegmentDamaged
from eyas.base.files import TEMPORARY_SUFFIX, fsync_folder, read_json, tree_bytes
from eyas.base.layout import Layout
from eyas.base.progress import Progress, SilentProgress
from eyas.base.seal import is_sealed, read_seal, seal_faults
from eyas.base.stop import StopFlag
from eyas.store.ledger import Ledger
from eyas.store.ledger_moves import forget_segment, segment_of, segment_uses
from eyas.store.segment import verify_segment
from eyas.store.segment_header import SegmentHeader, read_header

_TEMPORARY = re.compile(r"\..+\.(?P<pid>\d+)" + re.escape(TEMPORARY_SUFFIX))
_CHECKPOINT = re.compile(r"step-\d{8}")

RemovalKind = Literal["superseded", "released", "temporary", "checkpoint"]


@dataclass(frozen=True)
class Removal:
    """Something that may be removed, and why."""

    path: Path
    kind: RemovalKind
    num_bytes: int
    why: str


def find_removable(layout: Layout, ledger: Ledger, keep_checkpoints: int) -> list[Removal]:
    """All that may be removed; reads headers, no tensors. The caller holds the project lock."""
    return [
        *_superseded(layout, ledger),
        *_released(layout, ledger),
        *_temporaries(layout),
        *_old_checkpoints(layout, keep_checkpoints),
    ]


def remove(
    layout: Layout,
    ledger: Ledger,
    removals: list[Removal],
    progress: Progress | None = None,
    stop: StopFlag | None = None,
) -> list[Removal]:
    """Remove; returns what was removed.

    The segments that hold a superseded one's samples are hashed first; where one is not whole, the
    superseded one stays. Every step may be cut off: what is left is found again by `find_removable`.

    Raises:
        Stopped: between two removals.
        OSError: something could not be removed.
    """
    progress, stop = progress or SilentProgress(), stop or StopFlag()
    proven: dict[str, SegmentHeader | None] = {}
    done = []
    progress.start("clear", total=sum(removal.num_bytes for removal in removals), unit="bytes")
    for removal in removals:
        stop.check()
        if removal.kind == "superseded":
            if not _held_elsewhere(layout, ledger, removal.path, proven):
                progress.say(f"{removal.path.name} stays: another segment does not hold all of it whole")
                continue
            # The ledger first: a crash in between leaves a file of copies, which is adopted again.
            forget_segment(ledger, removal.path.name)
            removal.path.unlink(missing_ok=True)
        elif removal.path.is_dir():
            _remove_folder(removal.path)
        else:
            removal.path.unlink(missing_ok=True)
        fsync_folder(removal.path.parent)
        done.append(removal)
        progress.advance(removal.num_bytes)
    return done


def _superseded(layout: Layout, ledger: Ledger) -> Iterator[Removal]:
    for use in segment_uses(ledger):
        if use.is_superseded and use.num_samples > 0 and (layout.segments / use.name).is_file():
            why = f"other segments hold its {use.num_samples} samples"
            yield Removal(layout.segments / use.name, "superseded", use.num_bytes, why)


def _released(layout: Layout, ledger: Ledger) -> Iterator[Removal]:
    for segment in ledger.segments(state="released"):
        if (layout.segments / segment.name).is_file():
            why = f"its {segment.num_samples} samples are trained on and released"
            yield Removal(layout.segments / segment.name, "released", segment.num_bytes, why)


def _held_elsewhere(
    layout: Layout, ledger: Ledger, path: Path, proven: dict[str, SegmentHeader | None]
) -> bool:
    """Whether other segments, hashed now, hold the very same tensors of every sample in ``path``."""
    try:
        header = read_header(path)
    except (SegmentDamaged, FormatTooNew, FileNotFoundError):
        return False  # unexplained: for `eyas store repair`
    for sample in header.ids:
        name = segment_of(ledger, sample)
        if name is None or name == path.name:
            return False
        if name not in proven:
            proven[name] = _whole(layout.segments / name)
        holder = proven[name]
        if holder is None or not _same_tensors(header, holder, sample):
            return False
    return True


def _whole(path: Path) -> SegmentHeader | None:
    try:
        header = read_header(path)
        return None if verify_segment(path, header) else header
    except (SegmentDamaged, FormatTooNew, OSError):
        return None


def _same_tensors(first: SegmentHeader, second: SegmentHeader, sample: str) -> bool:
    names = [f"{sample}/{part}" for part in ("aux", "last", "tokens", "spans")]
    return all(
        name in first.tensors
        and name in second.tensors
        and first.tensors[name].checksum == second.tensors[name].checksum
        for name in names
    )


def _temporaries(layout: Layout) -> Iterator[Removal]:
    """Unfinished files and folders, in eyas's own folders, of processes that do not run any more."""
    places = [layout.state, layout.store, layout.segments, layout.data, layout.answers, layout.drafter]
    places += [layout.checkpoints, layout.exports, layout.reports]
    for folder in places:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            named = _TEMPORARY.fullmatch(path.name)
            if named and not path.is_symlink() and not _runs(int(named["pid"])):
                num_bytes = tree_bytes(path) if path.is_dir() else path.stat().st_size
                why = f"process {named['pid']} ended before it was finished"
                yield Removal(path, "temporary", num_bytes, why)


def _runs(pid: int) -> bool:
    """Whether a process of that number is there; a reused number keeps a file a while longer."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def _old_checkpoints(layout: Layout, keep: int) -> Iterator[Removal]:
    """Sealed checkpoints that are neither among the newest nor the best of any that is kept."""
    if not layout.checkpoints.is_dir():
        return
    sealed = [path for path in sorted(layout.checkpoints.glob("step-*")) if is_sealed(path)]
    sealed = [path for path in sealed if _CHECKPOINT.fullmatch(path.name)]
    if sealed and _is_unvalidated(sealed[-1]):
        keep += 1  # it will be replaced: the one before stands in for it meanwhile, as the trainer has it
    kept = sealed[max(0, len(sealed) - keep) :]
    try:
        best = {_best_step(path) for path in kept}
        whole = not any(seal_faults(path, deep=False) for path in kept)
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        return  # an older one may be what training goes on from
    for path in sealed[: len(sealed) - len(kept)]:
        if int(path.name.removeprefix("step-")) not in best:
            why = f"{keep} newer ones are kept, and it is not the best"
            yield Removal(path, "checkpoint", tree_bytes(path), why)


def _is_unvalidated(path: Path) -> bool:
    """Whether the validation that was due at a checkpoint was cut off."""
    with contextlib.suppress(EyasError, OSError, ValueError, KeyError, TypeError):
        return bool(read_seal(path)["about"].get("unvalidated"))
    return False


def _best_step(path: Path) -> int | None:
    best = read_json(path / "state.json")["best"]
    return None if best is None else int(best["step"])


def _remove_folder(path: Path) -> None:
    """Renamed first: a crash amid removal must not leave a folder that looks damaged."""
    doomed = path
    if not path.name.endswith(TEMPORARY_SUFFIX):
        doomed = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        os.rename(path, doomed)
        fsync_folder(path.parent)
    shutil.rmtree(doomed)
