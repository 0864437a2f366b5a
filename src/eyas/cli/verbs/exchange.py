"""``eyas store import`` and ``eyas store export``: older layouts in and out."""

from __future__ import annotations

import contextlib
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from eyas.base.errors import DamageFound
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.base.storage import named_storage_errors
from eyas.base.units import counted, format_bytes, format_count
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json, table
from eyas.cli.progress import listener
from eyas.cli.verbs.store import refuse_bound, writing
from eyas.pipeline.signals import stop_on_signals
from eyas.stages.project import Project
from eyas.store.repair import open_or_rebuild

_COMMON = Common()
_MOST_FILES_SHOWN = 50

LastState = Literal["pre_norm", "post_norm"]


def import_(
    folder: Path,
    /,
    *,
    layout: Literal["auto", "rows", "speculators", "safetensors"] = "auto",
    last: LastState | None = None,
    fingerprint: str | None = None,
    computed_in: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
    dry_run: bool = False,
    common: Common = _COMMON,
) -> int:
    """Take states that another tool captured into the store; what does not fit is listed and left alone.

    Each tensor is checked. A sample is known by its tokens; spans come from data/samples, or from the
    loss mask while there are none. Layers come from extract.aux_layers. The next extract captures some
    of the imported samples again and compares.

    Args:
        folder: where the files lie, in subfolders or not.
        layout: rows (.pt, .ckpt), speculators (hs_N.safetensors), safetensors (one file a sample).
        last: whether last states are from before the final norm; by default as the layout's own tool has it.
        fingerprint: of the weights they were captured with; by default the present target's.
        computed_in: arithmetic of that target; by default target.dtype, or the states' own.
        dry_run: read and check everything, change nothing.
    """
    from eyas.store.layouts.naming import DEFAULT_LAST, find_files

    project = common.open()
    refuse_bound(project, "an import may be larger than the bound, and belongs to no wave")
    name, _ = find_files(folder, layout)
    work: Any = import_module("eyas.stages.exchange.incoming")
    recipe = work.import_recipe(project, fingerprint, computed_in)
    progress = listener("import", common.json)
    options = {"layout": name, "last": last or DEFAULT_LAST[name], "recipe": recipe, "progress": progress}
    if dry_run:
        result = work.import_store(project, folder.resolve(), ledger=None, stop=StopFlag(), **options)
    else:
        result = _import(work, project, folder, options, progress)
    _show_import(result, common, _again(folder, layout, last, fingerprint, computed_in) if dry_run else None)
    damaged = any(left.kind != "unmatched" for left in result.left)
    return DamageFound.exit_code if damaged else 0


def _import(work: Any, project: Project, folder: Path, options: dict[str, Any], progress: Progress) -> Any:
    with writing(project.layout, "store import") as stop:
        ledger, _ = open_or_rebuild(project.layout, progress=progress)
        with contextlib.closing(ledger):
            return work.import_store(project, folder.resolve(), ledger=ledger, stop=stop, **options)


def _again(folder: Path, layout: str, *options: str | None) -> str:
    """The words of this import without --dry-run."""
    given = zip(("--last", "--fingerprint", "--computed-in"), options, strict=True)
    words = ["eyas", "store", "import", str(folder), *(["--layout", layout] if layout != "auto" else [])]
    words += [word for name, value in given if value is not None for word in (name, value)]
    return shlex.join(words)


def _show_import(result: Any, common: Common, again: str | None) -> None:
    """Print what was done; of a dry run, with the command ``again`` that does it."""
    num_fit = result.num_files - len(result.left)
    if common.json:
        print_json(
            {
                "layout": result.layout,
                "files": result.num_files,
                "fit": num_fit,
                "stored": result.num_stored,
                "known": result.num_known,
                "tokens": result.num_tokens,
                "recipe": result.recipe.as_dict(),
                "left_alone": [
                    {"path": str(left.path), "kind": left.kind, "why": left.why} for left in result.left
                ],
            }
        )
        return
    if result.left:
        shown = result.left[:_MOST_FILES_SHOWN]
        table(None, ["left alone", "because", "why"], [[str(f.path), f.kind, f.why] for f in shown])
        if len(result.left) > len(shown):
            note(f"and {format_count(len(result.left) - len(shown))} more; --json names all")
    if again is not None:
        note(f"{format_count(num_fit)} of {counted(result.num_files, 'file')} would be imported")
        next_command(f"{again}{common.suffix}" if num_fit else None)
        return
    note(
        f"{counted(result.num_stored, 'sample')} imported ({counted(result.num_tokens, 'token')}) from "
        f"{counted(result.num_files, 'file')}, {format_count(result.num_known)} known already, "
        f"{counted(len(result.left), 'file')} left alone"
    )
    next_command(f"eyas extract{common.suffix}")


def export(
    folder: Path,
    /,
    *,
    layout: Literal["rows", "speculators", "safetensors"] = "safetensors",
    last: LastState | None = None,
    split: Literal["train", "validation"] | None = None,
    dry_run: bool = False,
    common: Common = _COMMON,
) -> int:
    """Write stored samples as files that other tools read; the store stays as it is.

    Args:
        folder: a new or empty folder.
        layout: rows (.ckpt in rows_A-B), speculators (hs_N.safetensors), safetensors (one file a sample).
        last: pre_norm writes last states from before the final norm, of unit scale.
        split: only this one.
        dry_run: say how much it would be and write nothing.
    """
    from eyas.store.layouts.naming import DEFAULT_LAST
    from eyas.store.ledger import Ledger

    project = common.open()
    if dry_run:
        with Ledger.open_read_only(project.layout.ledger) as ledger:
            count = sum(1 for _ in ledger.stored(split))
            released = ledger.counts()["released"].samples
            num_bytes = sum(segment.num_bytes for segment in ledger.segments())
        if common.json:
            print_json({"samples": count, "stored_bytes": num_bytes, "released": released})
        else:
            size = format_bytes(num_bytes)
            note(f"{counted(count, 'sample')} would be written; all of the store is {size}")
            _note_released(released)
            options = (("--layout", layout), ("--last", last), ("--split", split))
            words = [word for name, value in options if value is not None for word in (name, value)]
            again = shlex.join(["eyas", "store", "export", str(folder), *words])
            next_command(f"{again}{common.suffix}" if count else None)
        return 0
    work: Any = import_module("eyas.stages.exchange.outgoing")
    stop = StopFlag()
    with named_storage_errors(folder.resolve().parent), stop_on_signals(stop):
        count = work.export_store(
            project,
            folder.resolve(),
            layout=layout,
            last=last or DEFAULT_LAST[layout],
            split=split,
            progress=listener("export", common.json),
            stop=stop,
        )
    with Ledger.open_read_only(project.layout.ledger) as ledger:
        released = ledger.counts()["released"].samples
    if common.json:
        print_json({"samples": count, "folder": str(folder), "layout": layout, "released": released})
    else:
        note(f"{counted(count, 'sample')} written to {folder}")
        _note_released(released)
        next_command(None)
    return 0


def _note_released(count: int) -> None:
    """Say what an export cannot hold."""
    if count:
        note(f"{counted(count, 'sample')} released (store.max_bytes), not among them")
