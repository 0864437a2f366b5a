"""``eyas inspect``: what a checkpoint is, and what is wrong with it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import DamageFound
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json, table
from eyas.config.target_facts import read_target_facts

if TYPE_CHECKING:
    from eyas.export.findings import Inspection

_MARKS = {"fault": "x", "warning": "!", "note": "-"}


def inspect(folder: Path, *, target: Path | None = None, common: Common = Common()) -> int:  # noqa: B008
    """Say what an export or checkpoint is and what is wrong with it; exit code 14 when something is.

    Args:
        folder: an export, a checkpoint, or a drafter from elsewhere.
        target: folder of its target, to compare sizes, positions and head rows with.
    """
    found = _inspect(folder, target)
    if common.json:
        print_json({"folder": str(folder), **found.as_dict()})
        return DamageFound.exit_code if found.faults else 0
    table(f"{folder}: {found.kind}", ["what", "value"], [[label, value] for label, value in found.facts])
    for finding in found.findings:
        print(f"{_MARKS[finding.severity]} {finding.severity} {finding.code}: {finding.what}")
        if finding.evidence:
            print(f"    {finding.evidence}")
        if finding.hint:
            print(f"    hint: {finding.hint}")
    counts = {s: sum(f.severity == s for f in found.findings) for s in _MARKS}
    note(f"\n{counts['fault']} faults, {counts['warning']} warnings, {counts['note']} notes")
    if target is None and found.kind == "eagle3 export":
        next_command(f"eyas inspect {folder} --target FOLDER, which also compares it with its target")
    return DamageFound.exit_code if found.faults else 0


def _inspect(folder: Path, target: Path | None) -> Inspection:
    inspect_folder = import_module("eyas.export.inspect").inspect_folder
    arguments: dict[str, Any] = {}
    if target is not None:
        parts = import_module("eyas.targets.parts").load_parts(target)
        arguments = {"target": read_target_facts(target), "embedding": parts.embedding, "head": parts.head}
    inspection: Inspection = inspect_folder(folder, **arguments)
    return inspection
