"""Printing: data on stdout, everything for people on stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from eyas.base.errors import EyasError

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: object) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def print_error(error: EyasError, as_json: bool) -> None:
    """An error in its four parts; nothing but the label is coloured, and never by colour alone."""
    if as_json:
        print_json(error.as_dict())
        return
    label = "stopped" if error.code == "Stopped" else "error"
    coloured = f"\033[1;31m{label}\033[0m" if _colour(sys.stderr) else label
    lines = [f"{coloured}: {error.what}"]
    if error.where:
        lines.append(f"  where: {error.where}")
    if error.why:
        lines.append(f"  why:   {error.why}")
    if error.hint:
        lines.append(f"\nhint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")


def note(message: str) -> None:
    """One line for a person, on stderr."""
    sys.stderr.write(message + "\n")


def next_command(command: str | None) -> None:
    """The one next command, last."""
    note(f"\nnext: {command}" if command else "\nnothing to do")


def console() -> Console:
    """A rich console on stdout (for tables that are the data of a verb)."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def table(title: str | None, columns: list[str], rows: list[list[Any]]) -> None:
    """A plain table on stdout; columns whose cells are numbers are aligned right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) or row[index] in ("", "-") for row in rows)
        drawn.add_column(column, justify="right" if numeric and rows else "left")
    for row in rows:
        drawn.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row])
    console().print(drawn)


def _colour(stream: Any) -> bool:
    import os

    return bool(stream.isatty()) and "NO_COLOR" not in os.environ
