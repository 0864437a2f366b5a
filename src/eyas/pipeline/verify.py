"""Is everything in a project still what was written? Looks, and changes nothing but the ledger's notes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from eyas.base.errors import EyasError, ProjectLocked
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.base.seal import SEAL_NAME, is_sealed, seal_faults
from eyas.pipeline.lock import hold_lock
from eyas.pipeline.order import STAGES
from eyas.stages.project import Project
from eyas.stages.protocol import Damage
from eyas.store import scrub
from eyas.store.doubt import unhashed_segments
from eyas.store.faults import Fault
from eyas.store.imports import imports_fault, imports_path
from eyas.store.ledger import Ledger
from eyas.store.place import require_mounted
from eyas.store.segment_header import segment_number

NUM_WORKERS = 4
"""Segments hashed at once: more than one, so that hashing hides behind reading."""

_READ_ONLY_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Finding:
    """Something that is not as it was written.

    Args:
        part: ``store``, or the stage whose output it is.
        place: path within the project.
        kind: of a store's fault; ``seal`` for everything else.
        sample_ids: the stored samples that it touches.
        is_damage: False for leftovers and for segments that the next run adopts.
    """

    part: str
    place: str
    kind: str
    detail: str
    sample_ids: tuple[str, ...] = ()
    is_damage: bool = True

    def as_dict(self) -> dict[str, object]:
        """The finding as ``--json`` prints it."""
        return {
            "part": self.part,
            "place": self.place,
            "kind": self.kind,
            "detail": self.detail,
            "sample_ids": list(self.sample_ids),
            "is_damage": self.is_damage,
        }


@dataclass
class Verification:
    """What a verification looked at and found.

    Args:
        num_segments: segments in the folder.
        num_hashed: segments whose every byte was hashed now.
        num_skipped: segments that were hashed before since this boot and mount.
        notes: lines that a person should read.
    """

    deep: bool
    num_segments: int = 0
    num_hashed: int = 0
    num_skipped: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def damage(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_damage]


def verify_project(
    project: Project,
    *,
    deep: bool,
    progress: Progress,
    share: float | None = None,
    seed: int = 0,
    again: bool = False,
) -> Verification:
    """Look at the store, all sealed folders, the answers and the reports.

    Args:
        deep: hash everything; otherwise names, sizes, headers and the ledger against the folder.
        share: hash only this share of the segments, picked by hash of ``seed`` and name.
        again: hash also segments that were found whole since this boot and mount.

    Raises:
        StoreNotMounted: the store's disk is not there.
    """
    require_mounted(project.layout)
    result = Verification(deep)
    _verify_store(project.layout, result, share, seed, again, progress)
    if why := imports_fault(project.layout):
        place = str(imports_path(project.layout).relative_to(project.layout.root))
        result.findings.append(Finding("extract", place, "seal", why))
    stages = [stage for stage in STAGES if stage.name != "extract"]
    if deep:
        progress.start("verify sealed folders", total=len(stages), unit="stages")
    for stage in stages:
        for damage in stage.damages(project, deep=deep):
            result.findings += _named(stage.name, damage, project.layout, deep)
        if deep:
            progress.advance(1)
    result.findings += _other_exports(project, result.findings, deep)
    known = {finding.place for finding in result.findings}
    result.findings += [lost for lost in _lost_seals(project.layout) if lost.place not in known]
    return result


def _named(part: str, damage: Damage, layout: Layout, deep: bool) -> list[Finding]:
    """A damage by its files: of a sealed folder, each that is not what was sealed."""
    if is_sealed(damage.path):
        found = [text.partition(": ") for text in seal_faults(damage.path, deep=deep)]
        if found:
            return [
                Finding(part, str((damage.path / name).relative_to(layout.root)), "seal", detail)
                for name, _, detail in found
            ]
    return [Finding(part, str(damage.path.relative_to(layout.root)), "seal", damage.detail)]


def _other_exports(project: Project, found: list[Finding], deep: bool) -> list[Finding]:
    """Faults of exports under names that the configuration does not hold now."""
    layout, known = project.layout, {finding.place for finding in found}
    others = sorted(layout.exports.iterdir()) if layout.exports.is_dir() else []
    findings: list[Finding] = []
    for folder in others:
        if folder.name.startswith(".") or not is_sealed(folder):
            continue
        damage = Damage(folder, "")
        findings += [f for f in _named("export", damage, layout, deep) if f.detail and f.place not in known]
    return findings


def _verify_store(
    layout: Layout, result: Verification, share: float | None, seed: int, again: bool, progress: Progress
) -> None:
    names = _segment_names(layout)
    result.num_segments = len(names)
    if not result.deep:
        _take(layout, result, scrub.quick(layout))
        return
    with _ledger_for_notes(layout, result) as ledger:
        verified = set() if again else _verified(layout, ledger)
        chosen = names if share is None else pick(names, share, seed)
        left = [name for name in chosen if name not in verified]
        result.num_hashed, result.num_skipped = len(left), len(chosen) - len(left)
        found = scrub.deep(layout, ledger, names=left, num_workers=NUM_WORKERS, progress=progress)
        _take(layout, result, found)


def _take(layout: Layout, result: Verification, faults: Sequence[Fault]) -> None:
    for fault in faults:
        if fault.path == layout.samples:
            continue  # the seal of the samples says it, and which file
        place = str(fault.path.relative_to(layout.root))
        result.findings.append(
            Finding("store", place, fault.kind, fault.detail, fault.sample_ids, fault.is_damage)
        )


def _segment_names(layout: Layout) -> list[str]:
    if not layout.segments.is_dir():
        return []
    return sorted(path.name for path in layout.segments.iterdir() if segment_number(path.name) is not None)


def pick(names: Sequence[str], share: float, seed: int) -> list[str]:
    """At least one name and about ``share`` of them; the same ones for the same seed."""
    count = min(len(names), math.ceil(share * len(names)))
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    return sorted(ranked[:count])


def _verified(layout: Layout, ledger: Ledger | None) -> set[str]:
    """Segments that were hashed since this boot and mount, and not written to since."""
    if not layout.ledger.exists() or not layout.segments.is_dir():
        return set()
    if ledger is None:
        with contextlib.suppress(EyasError), Ledger.open_read_only(layout.ledger) as opened:
            return _verified(layout, opened)
        return set()
    return {record.name for record in ledger.segments()} - set(unhashed_segments(layout, ledger))


@contextlib.contextmanager
def _ledger_for_notes(layout: Layout, result: Verification) -> Iterator[Ledger | None]:
    """The ledger for writing, with the lock held; None, and a note, when it cannot be written."""
    with contextlib.ExitStack() as stack:
        ledger = None
        if layout.ledger.exists():
            try:
                stack.enter_context(hold_lock(layout.state, "verify"))
                ledger = stack.enter_context(Ledger.open(layout.ledger, create=False))
            except ProjectLocked as error:
                result.notes.append(f"{error.what}: verified without noting it in the ledger")
            except EyasError:
                pass  # named by the scrub, which opens it for reading
            except OSError as error:
                if error.errno not in _READ_ONLY_ERRNOS:
                    raise
                result.notes.append(f"the ledger cannot be written ({error.strerror}): nothing is noted")
        yield ledger


def _lost_seals(layout: Layout) -> list[Finding]:
    """Folders that are only ever made with a seal and have none."""
    places = [("prepare", layout.prompts), ("prepare", layout.samples), ("train", layout.vocabulary)]
    if layout.checkpoints.is_dir():
        places += [("train", path) for path in sorted(layout.checkpoints.glob("step-*"))]
    if layout.exports.is_dir():
        visible = [path for path in sorted(layout.exports.iterdir()) if not path.name.startswith(".")]
        places += [("export", path) for path in visible if path.is_dir()]
    return [
        Finding(part, str(path.relative_to(layout.root)), "seal", f"{SEAL_NAME} is missing")
        for part, path in places
        if path.is_dir() and not is_sealed(path)
    ]
