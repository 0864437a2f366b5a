"""``eyas inspect``: what a checkpoint is, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from eyas.base.errors import DamageFound, UsageError
from eyas.base.units import counted
from eyas.cli.common import Apart
from eyas.cli.output import next_command, note, print_json, table
from eyas.config.target_facts import read_target_facts
from eyas.targets.bench.prompts import read_prompts

if TYPE_CHECKING:
    from eyas.export.findings import Inspection

_MARKS = {"fault": "x", "warning": "!", "note": "-"}


def inspect(
    folder: Path,
    *,
    target: Path | None = None,
    probe: bool = False,
    prompts: Annotated[tuple[Path, ...], Parameter(name="--prompts")] = (),
    limit: int = 16,
    max_tokens: int = 64,
    common: Apart = Apart(),  # noqa: B008 - frozen
) -> int:
    """Say what an export or checkpoint is and what is wrong with it; exit code 14 when something is.

    Args:
        folder: an export, a checkpoint, or a drafter from elsewhere.
        target: folder of its target, to compare sizes, positions and head rows with.
        probe: try it on a handful of prompts that the target answers here: acceptance length as served,
            with layers moved by one and with the mapping moved by one.
        prompts: JSONL of prompts to try it on, in any form that prepare reads; a few are built in.
        limit: use at most this many of them.
        max_tokens: longest answer.
    """
    if (probe or prompts) and target is None:
        raise UsageError("a try needs the target", hint=f"eyas inspect {folder} --target FOLDER --probe")
    if limit < 1 or max_tokens < 2:
        raise UsageError("--limit is at least 1 and --max-tokens 2", hint="eyas inspect --help")
    found, tried = _inspect(folder, target), None
    if target is not None and (probe or prompts) and _can_be_tried(found):
        asked = read_prompts(prompts, limit=limit) if prompts else []
        tried = import_module("eyas.stages.live_probe").probe_drafter(
            folder, target, read_target_facts(target), asked, max_new_tokens=max_tokens
        )
        order = {"fault": 0, "warning": 1, "note": 2}
        every = sorted([*found.findings, *tried.findings], key=lambda finding: order[finding.severity])
        found = replace(found, findings=every)
    if common.json:
        shown = {"folder": str(folder), **found.as_dict()}
        print_json({**shown, **({"probe": tried.as_dict()} if tried is not None else {})})
        return DamageFound.exit_code if found.faults else 0
    table(f"{folder}: {found.kind}", ["what", "value"], [[label, value] for label, value in found.facts])
    if tried is not None:
        rows = [[one.name, f"{one.acceptance_length:.3f}"] for one in tried.tries]
        title = f"on {tried.num_prompts} prompts, chain of 3, greedy"
        table(title, ["fed", "acceptance length"], rows)
    for finding in found.findings:
        print(f"{_MARKS[finding.severity]} {finding.severity} {finding.code}: {finding.what}")
        if finding.evidence:
            print(f"    {finding.evidence}")
        if finding.hint:
            print(f"    hint: {finding.hint}")
    counts = {s: sum(f.severity == s for f in found.findings) for s in _MARKS}
    note("\n" + ", ".join(counted(count, severity) for severity, count in counts.items()))
    if target is None and found.kind == "eagle3 export":
        next_command(f"eyas inspect {folder} --target FOLDER, which also compares it with its target")
    return DamageFound.exit_code if found.faults else 0


def _can_be_tried(found: Inspection) -> bool:
    """Whether it computes at all: tensors whole and of the right sizes."""
    broken = {
        "config-unreadable", "weights-unreadable", "tensor-missing", "tensor-unknown", "tensor-shape",
        "tensor-dtype", "not-finite", "norm-flag-contradicted", "mapping-length", "mapping-dtype",
        "mapping-range", "mapping-absolute", "mapping-missing", "target-vocab-differs", "layers-range",
        "target-hidden-differs", "layers-count", "layers-unsaid",
    }  # fmt: skip
    return found.kind == "eagle3 export" and not any(f.code in broken for f in found.faults)


def _inspect(folder: Path, target: Path | None) -> Inspection:
    inspect_folder = import_module("eyas.export.inspect").inspect_folder
    arguments: dict[str, Any] = {}
    if target is not None:
        parts = import_module("eyas.targets.parts").load_parts(target)
        arguments = {"target": read_target_facts(target), "embedding": parts.embedding, "head": parts.head}
    inspection: Inspection = inspect_folder(folder, **arguments)
    return inspection
