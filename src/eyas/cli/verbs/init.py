"""``eyas init``: a project folder."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from eyas.base.errors import DataError, UsageError
from eyas.base.files import write_atomic
from eyas.base.layout import CONFIG_NAME, FORMAT
from eyas.cli.common import Making
from eyas.cli.output import next_command, note, print_json
from eyas.config.load import _apply_override, validate_config
from eyas.config.target_facts import read_target_facts


def init(
    folder: Path,
    *,
    model: Path,
    data: tuple[Path, ...],
    held_out: Path | None = None,
    keep_answers: bool = False,
    dry_run: bool = False,
    common: Making = Making(),  # noqa: B008 - frozen
) -> int:
    """Make a project folder from a target and chat data.

    Args:
        folder: where the project is made.
        model: folder of the target (config.json, tokenizer, safetensors).
        data: JSONL file of conversations, prompts or token rows; may be repeated.
        held_out: JSONL file of prompts kept for evaluation.
        keep_answers: train on the answers as given instead of the target's own.
        dry_run: print eyas.toml and write nothing.
    """
    path = folder / CONFIG_NAME
    if path.exists():
        raise UsageError("there is a project already", where=path, hint=f"eyas status --project {folder}")
    read_target_facts(model)
    for file in (*data, *([held_out] if held_out else [])):
        if not file.is_file():
            raise DataError("a data file does not exist", where=file, hint="give a .jsonl or .jsonl.gz file")
    text = _render(folder, model, data, held_out, keep_answers, common.set)
    validate_config(tomllib.loads(text), path)
    if dry_run:
        print(text, end="")
        return 0
    write_atomic(path, text)
    if common.json:
        print_json({"project": str(folder), "config": str(path)})
        return 0
    note(f"wrote {path}")
    next_command(f"eyas run --project {folder}")
    return 0


def _render(
    folder: Path,
    model: Path,
    data: tuple[Path, ...],
    held_out: Path | None,
    keep_answers: bool,
    overrides: tuple[str, ...],
) -> str:
    """The text of ``eyas.toml``: what was given, and comments that name the dials."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("A project of eyas. All keys and defaults: eyas config show --defaults"))
    document["format"] = FORMAT
    target = tomlkit.table()
    target["model"] = _stored_path(model, folder)
    document["target"] = target
    section = tomlkit.table()
    sources = tomlkit.aot()
    for file in data:
        source = tomlkit.table()
        source["path"] = _stored_path(file, folder)
        sources.append(source)
    section["sources"] = sources
    document["data"] = section
    if keep_answers:
        regenerate = tomlkit.table()
        regenerate["enabled"] = False
        document["regenerate"] = regenerate
    if held_out is not None:
        evaluate = tomlkit.table()
        evaluate["prompts"] = _stored_path(held_out, folder)
        document["evaluate"] = evaluate
    for override in overrides:
        _apply_override(document, override)
    return tomlkit.dumps(document)


def _stored_path(path: Path, folder: Path) -> str:
    """Relative to the project where they lie close together, so that both can be moved; else absolute."""
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return relative if relative.count("..") <= 2 else str(path.resolve())
