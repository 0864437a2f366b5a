"""The store, segment by segment, and folders of per-sample files that another tool left in it."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.base.errors import EyasError
from eyas.base.seal import read_seal
from eyas.base.units import counted, format_count
from eyas.pipeline import verify
from eyas.recovery.findings import Check, Finding, Line, Severity, verdict
from eyas.recovery.scene import Scene
from eyas.store.ledger import Ledger

_CODES: dict[str, tuple[str, Severity]] = {
    "missing": ("segment-missing", "damage"),
    "size": ("segment-damaged", "damage"),
    "header": ("segment-damaged", "damage"),
    "content": ("segment-damaged", "damage"),
    "recipe": ("segment-of-other-recipe", "damage"),
    "format": ("segment-too-new", "failed"),
    "ledger": ("segment-disagrees", "damage"),
    "recipe_file": ("store-recipe-damaged", "damage"),
    "foreign": ("foreign-file", "warn"),
    "unknown": ("segment-unknown", "warn"),
}
_ROWS = re.compile(r"rows_(\d+)-(\d+)")
_SAMPLE_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})


@dataclass(frozen=True)
class Row:
    """One line of the store's table: a segment, or a ``rows_A-B`` folder."""

    name: str
    expected: int | None
    found: int | None
    damaged: str

    def as_text(self) -> str:
        expected = "-" if self.expected is None else counted(self.expected, "sample")
        found = "-" if self.found is None else format_count(self.found)
        damaged = f", damaged: {self.damaged}" if self.damaged else ""
        return f"{self.name}  {expected} expected, {found} found{damaged}"


@dataclass(frozen=True)
class StoreFacts:
    """The verification's findings, and the table."""

    findings: tuple[verify.Finding, ...]
    rows: tuple[Row, ...]
    num_samples: int
    exists: bool
    deep: bool
    ledger_lost: bool = False
    not_mounted: bool = False
    older: tuple[Row, ...] = field(default=())


def look(scene: Scene) -> StoreFacts:
    layout, found = scene.layout, scene.verification
    findings = tuple(f for f in found.findings if f.part == "store")
    damaged = {Path(f.place).name: f.kind for f in findings if f.is_damage}
    rows, stored = [], 0
    lost = True
    with scene.ledger() as ledger:
        if ledger is not None:
            lost = _lists_too_few(scene, ledger)
            used = ledger.stored_counts()
            stored = sum(used.values())
            for record in ledger.segments():
                there = (layout.segments / record.name).is_file()
                count = used.get(record.name, 0)
                rows.append(Row(record.name, count, count if there else 0, damaged.get(record.name, "")))
    older = tuple(_older_rows(layout.store))
    return StoreFacts(
        findings, tuple(rows), stored, layout.segments.is_dir() or layout.store_recipe.exists(), found.deep,
        lost, scene.store_place[1] is not None, older,
    )  # fmt: skip


def _lists_too_few(scene: Scene, ledger: Ledger) -> bool:
    """Whether the ledger misses samples of data/samples; what it says of segments counts for little then."""
    with contextlib.suppress(EyasError):
        expected = read_seal(scene.layout.samples)["about"].get("num_samples", 0)
        return 0 < sum(count.samples for count in ledger.counts().values()) < int(expected)
    return False


def _older_rows(store: Path) -> list[Row]:
    rows = []
    for folder in sorted(store.glob("rows_*-*")) if store.is_dir() else []:
        named = _ROWS.fullmatch(folder.name)
        if named is None or not folder.is_dir():
            continue
        files = [p for p in folder.iterdir() if p.suffix in _SAMPLE_SUFFIXES]
        empty = sum(1 for path in files if path.stat().st_size == 0)
        expected = int(named[2]) - int(named[1])
        rows.append(Row(folder.name, expected, len(files), f"{empty} empty files" if empty else ""))
    return rows


def judge(scene: Scene, facts: StoreFacts) -> Line:
    if facts.not_mounted:
        return Line("store", "unknown", "not looked at: its disk is not mounted")
    if not facts.exists and not facts.findings and not facts.older:
        return Line("store", "skipped", "nothing stored yet")
    findings = []
    for found in facts.findings:
        if found.kind in ("temporary", "released") or found.place == "state/ledger.db":
            continue  # swept by the next run; the ledger's own check says the other
        if found.kind in ("unknown", "ledger") and facts.ledger_lost:
            continue  # without a whole ledger every segment is unknown: one fault, not one for each
        code, severity = _CODES[found.kind]
        detail: dict[str, Any] = {"path": found.place, "samples": len(found.sample_ids)}
        samples = counted(len(found.sample_ids), "sample") if found.sample_ids else ""
        what = f"{Path(found.place).name}: {found.detail}"
        evidence = (f"{found.place}: {found.kind}; {found.detail}", *([samples] if samples else []))
        findings.append(Finding(code, found.place, severity, what, evidence, detail=detail))
    findings += [
        Finding(
            "older-layout",
            f"store/{row.name}",
            "warn",
            f"{row.name} holds {row.found} of {row.expected} samples of an older layout",
            (row.as_text(),),
            mend=f"eyas store import {shlex.quote(str(scene.layout.store / row.name))}",
        )
        for row in facts.older
    ]
    how = "every hash" if facts.deep else "names, sizes and headers"
    fine = f"{counted(len(facts.rows), 'segment')}, {counted(facts.num_samples, 'sample')}: {how} as written"
    return verdict("store", findings, fine, [row.as_text() for row in (*facts.rows, *facts.older)])


CHECK = Check("store", look, judge)
