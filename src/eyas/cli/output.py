"""Printing: data on stdout, everything for people on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from eyas.base.errors import EyasError

if TYPE_CHECKING:
    from rich.console import Console


_ANY_WIDTH = 10_000
_NUMBER = re.compile(r"-?|[\d,.]+(?: [kMGTP]?B)?")


class Bar(Protocol):
    """Something that is redrawn in place until it ends."""

    def end(self) -> None:
        """Leave it as it stands; what is written now comes below it."""


NO_NEXT_VARIABLE = "EYAS_NO_NEXT"
"""Set by a program that calls a verb as one of its steps, and says itself what comes next."""
OPEN_BARS: set[Bar] = set()
"""Those that an error has to end before it is told: it may come in the middle of any."""


def print_json(value: object) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def print_error(error: EyasError, as_json: bool) -> None:
    """An error in its four parts; nothing but the label is coloured, and never by colour alone."""
    if as_json:
        print_json(error.as_dict())
        return
    for bar in list(OPEN_BARS):
        bar.end()
    # a stop that was asked for says so itself
    label, rest = (error.what, "") if error.code == "Stopped" else ("error", f": {error.what}")
    lines = [f"\033[1;31m{label}\033[0m{rest}" if _colour(sys.stderr) else f"{label}{rest}"]
    if error.where:
        lines.append(f"  where: {error.where}")
    if error.why:
        lines.append(f"  why:   {error.why}")
    if error.hint:
        lines.append(f"\nhint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")


def note(message: str, indent: int | None = None) -> None:
    """One line for a person, on stderr.

    Args:
        indent: fold it to the terminal's width, what is left of it so far in. Not for a line with a
            command: one that is cut in two cannot be copied.
    """
    sys.stderr.write((message if indent is None else folded(message, indent, sys.stderr)) + "\n")


def next_command(command: str | None) -> None:
    """The one next command, last; unless whoever called this verb as a step of its own says it."""
    if NO_NEXT_VARIABLE in os.environ:
        return
    note(f"\nnext: {command}" if command else "\nnothing to do")


def folded(line: str, indent: int, stream: TextIO | None = None) -> str:
    """A line folded to the terminal's width, what is left of it indented; elsewhere as it is.

    Args:
        stream: where it goes to; stdout when left out.
    """
    import shutil
    import textwrap

    if not (stream or sys.stdout).isatty():
        return line
    width = max(40, shutil.get_terminal_size().columns)
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, width, subsequent_indent=" " * indent, drop_whitespace=True, **options)


def console() -> Console:
    """A rich console on stdout (for tables that are the data of a verb)."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _ANY_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def table(title: str | None, columns: list[str], rows: list[list[Any]]) -> None:
    """A plain table on stdout; columns whose cells are numbers, with a unit or not, are aligned right.

    No cell is cut: a name has to be there whole for the next command. A terminal folds long ones; elsewhere
    a row is one line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(
            isinstance(row[index], int | float) or _NUMBER.fullmatch(str(row[index])) for row in rows
        )
        drawn.add_column(column, justify="right" if numeric and rows else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row])
    console().print(drawn)


def _colour(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ
