"""From ``eyas.toml`` and ``--set`` to a validated configuration, or to an error that names the key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from eyas.base.errors import ConfigError, FormatTooNew, NoProject
from eyas.base.layout import CONFIG_NAME, FORMAT
from eyas.config.schema import EyasConfig


def load_config(root: Path, overrides: Sequence[str] = ()) -> EyasConfig:
    """Read the configuration of the project in ``root``.

    Args:
        overrides: ``dotted.key=value`` pairs; the value is TOML, or a plain string.

    Raises:
        NoProject: there is no ``eyas.toml``.
        FormatTooNew: the project was made by a newer eyas.
        ConfigError: names the key, what is wrong with it and the nearest known key.
    """
    path = root / CONFIG_NAME
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NoProject(
            "no project here",
            where=root,
            why=f"there is no {CONFIG_NAME} in this folder",
            hint="eyas init DIR --model FOLDER --data FILE, or name the folder with --project DIR",
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("the configuration cannot be read", where=path, why=str(error)) from error
    _check_format(table, path)
    for override in overrides:
        _apply_override(table, override)
    return validate_config(table, path)


def _check_format(table: dict[str, Any], path: Path) -> None:
    written = table.get("format", FORMAT)
    if isinstance(written, int) and written > FORMAT:
        raise FormatTooNew(
            "this project was made by a newer eyas",
            where=path,
            why=f"its format is {written}; this eyas knows formats up to {FORMAT}",
            hint="pip install --upgrade eyas",
        )


def validate_config(table: dict[str, Any], where: Path) -> EyasConfig:
    """Check a parsed table against the schema. Raises ConfigError for the first fault."""
    try:
        return EyasConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _explain(first, where) from error


def _explain(fault: Any, where: Path) -> ConfigError:
    location = [part for part in fault["loc"] if isinstance(part, str | int)]
    key = _dotted(location)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = (
            f"did you mean {_dotted([*location[:-1], near[0]])}?"
            if near
            else f"known here: {', '.join(known)}"
        )
        return ConfigError(f"unknown key {key}", where=where, hint=hint)
    if fault["type"] == "missing":
        return ConfigError(f"{key} is missing", where=where, hint=f"add {key} to {where.name}")
    message = str(fault["msg"]).removeprefix("Value error, ")
    what = f"{key} cannot be {fault['input']!r}" if key else "the configuration does not fit together"
    return ConfigError(what, where=where, why=message, hint="eyas config show --defaults")


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in location)


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """Field names of the section at ``location``; list positions are passed through."""
    section: Any = EyasConfig
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(section.model_fields)


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r} has no value", hint="write it as --set train.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    node: Any = table
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {key}: {parent} is no table")
    node[last] = value
