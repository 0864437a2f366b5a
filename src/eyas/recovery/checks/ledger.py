"""Can the ledger be read, and does it list every sample?"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.errors import EyasError
from eyas.base.seal import is_sealed, read_seal
from eyas.base.units import format_count
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene
from eyas.store.ledger import Ledger


@dataclass(frozen=True)
class LedgerFacts:
    """Why the ledger cannot be read (None: it can), and how many samples it and data/samples list.

    ``num_expected`` is None while there are no samples, ``num_listed`` 0 before the first extraction.
    """

    exists: bool
    why: str | None
    num_listed: int
    num_expected: int | None
    has_outputs: bool
    page_faults: tuple[str, ...]


def look(scene: Scene) -> LedgerFacts:
    layout, expected = scene.layout, None
    if is_sealed(layout.samples):
        try:
            expected = int(read_seal(layout.samples)["about"].get("num_samples", 0))
        except EyasError:
            expected = None  # the check of the samples says so
    outputs = layout.segments.is_dir() or is_sealed(layout.samples) or is_sealed(layout.prompts)
    if not layout.ledger.exists():
        return LedgerFacts(False, None, 0, expected, outputs, ())
    try:
        with Ledger.open_read_only(layout.ledger) as ledger:
            listed = sum(count.samples for count in ledger.counts().values())
            faults = tuple(ledger.integrity_faults()) if scene.deep else ()
    except EyasError as error:
        return LedgerFacts(True, error.why or error.what, 0, expected, outputs, ())
    return LedgerFacts(True, None, listed, expected, outputs, faults)


def judge(scene: Scene, facts: LedgerFacts) -> Line:
    subject = "state/ledger.db"
    if not facts.exists:
        if not facts.has_outputs:
            return Line("ledger", "skipped", "nothing written yet")
        what = "the ledger is gone; it is rebuilt from data/, store/ and logs/"
        return verdict("ledger", [Finding("ledger-missing", subject, "damage", what)], "")
    why = facts.why or (facts.page_faults[0] if facts.page_faults else None)
    if why is not None:
        what = f"the ledger is damaged: {why}"
        return verdict("ledger", [Finding("ledger-damaged", subject, "damage", what, facts.page_faults)], "")
    if facts.num_expected is not None and 0 < facts.num_listed != facts.num_expected:
        what = f"the ledger lists {facts.num_listed} of {facts.num_expected} samples"
        evidence = (f"data/samples holds {facts.num_expected}, the ledger lists {facts.num_listed}",)
        return verdict("ledger", [Finding("samples-missing", subject, "damage", what, evidence)], "")
    return Line("ledger", "ok", f"readable, {format_count(facts.num_listed)} samples listed")


CHECK = Check("ledger", look, judge)
