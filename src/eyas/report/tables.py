"""Tables of the report as plain data, before they become HTML or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eyas.base.units import format_count


@dataclass(frozen=True)
class Cell:
    """One cell; ``key`` and ``value`` give the number behind the text, as ``status --json`` has it."""

    text: str
    key: str = ""
    value: float | int | str | None = None
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below a heading; without ``columns`` it is a list of names and values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Section:
    """A part of the page: a sentence, tables, and charts by its id; ``empty`` is said in place of nothing."""

    id: str
    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    empty: str = ""
    warnings: tuple[str, ...] = field(default=())


def by_count(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda entry: entry[1], reverse=True)


def rates_text(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def count_cell(value: int | None, key: str) -> Cell:
    return Cell("" if value is None else format_count(value), key, value, number=True)


def pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    return Table("", (), tuple((Cell(name), Cell(text)) for name, text in pairs))


def table(title: str, columns: tuple[str, ...], rows: Sequence[Sequence[object]]) -> Table:
    return Table(title, columns, tuple(tuple(_cell(value) for value in row) for row in rows))


def number_cell(text: str) -> Cell:
    return Cell(text, number=True)


def _cell(value: object) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, int):
        return Cell(f"{value:,}", number=True)
    return Cell(str(value))


def filled(tables: Sequence[Table]) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)
