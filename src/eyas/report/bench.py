"""What ``eyas bench`` measured, as tables for the terminal and as one HTML page with its charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eyas.report.charts import Chart, axes, line
from eyas.report.html import whole_page
from eyas.report.page import chart_data, section_html
from eyas.report.tables import Cell, Section, Table
from eyas.targets.bench.level import Measured, Spread
from eyas.targets.bench.run import BenchLevel, BenchResult

_MARKED = {"mode": "lines+markers"}


def speed_table(result: BenchResult) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: both servers at each concurrency; times are median and 95th percentile."""
    columns = [
        "concurrency", "server", "answers", "tokens/s", "speed-up", "acceptance length",
        "ms to first token", "ms per token",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for level in result.levels:
        rows.append(_row(_first_name(result), level.drafted, level.speedup))
        if level.plain is not None:
            rows.append(_row("plain", level.plain, None))
    return columns, rows


def _first_name(result: BenchResult) -> str:
    """What the first server is called; one that tells of no drafter is taken for one that has it."""
    return "no drafter" if result.drafts is False else "with drafter"


def _row(name: str, found: Measured, speedup: float | None) -> list[Any]:
    def milliseconds(spread: Spread | None) -> str:
        return "-" if spread is None else f"{1000 * spread.p50:.1f}, {1000 * spread.p95:.1f}"

    length = found.acceptance_length
    return [
        found.concurrency,
        name,
        found.answers,
        f"{found.tokens_per_second:.1f}",
        "-" if speedup is None else f"{speedup:.2f}",
        "-" if length is None else f"{length:.3f}",
        milliseconds(found.first_token),
        milliseconds(found.per_token),
    ]


def summary(result: BenchResult) -> list[tuple[str, str]]:
    """What follows from the numbers: what it is about, and a sentence."""
    told = []
    if result.acceptance_length is not None:
        told.append(("acceptance length", f"{result.acceptance_length:.3f} by the server's own counts"))
    for level in result.levels:
        told += [(f"at concurrency {level.concurrency}", text) for text in _level_sentences(level)]
    return [*told, *(("note", note) for note in result.notes)]


def _level_sentences(level: BenchLevel) -> list[str]:
    told = []
    if level.texts is not None:
        later = f", {level.texts.not_compared} later turns not compared" if level.texts.not_compared else ""
        told.append(f"{level.texts.equal} of {level.texts.compared} texts are equal{later}")
    if level.advice is not None:
        best, longer = level.advice.best, level.advice.longer
        said = f"{best.num_drafts} drafts" if best.num_drafts else "no drafter"
        trying = f"; {longer.num_drafts} may be worth a try" if longer else ""
        told.append(
            f"fastest with {said}, {best.tokens_per_second:.1f} tokens/s an answer by measured cost "
            f"and acceptance{trying}"
        )
    for measured in (level.drafted, level.plain):
        told += measured.warnings if measured else ()
    return told


def bench_page(result: BenchResult) -> str:
    """The page; it needs no network."""
    columns, rows = speed_table(result)
    cells = tuple(tuple(_cell(value) for value in row) for row in rows)
    section = Section(
        "bench",
        "Speed and acceptance",
        f"{result.num_prompts} prompts, none asked twice, at most {result.max_tokens} tokens an answer, "
        f"temperature {result.temperature:g}. Milliseconds are median and 95th percentile.",
        (_sentences(summary(result)), Table("", tuple(columns), cells)),
    )
    drawn = bench_charts(result)
    against = f" against {escape(result.plain_url)}" if result.plain_url else ""
    head = (
        f'<header id="head"><h1>{escape(result.model)}</h1>'
        f'<p class="quiet">{escape(result.url)} ({escape(result.engine)}){against}</p></header>'
    )
    content = f'{head}<main><section id="bench">{section_html(section, drawn)}</section></main>'
    return whole_page(f"{result.model}: eyas bench", content, chart_data(drawn))


def bench_charts(result: BenchResult) -> list[Chart]:
    """Speed and times over concurrency, acceptance by position, and what each K would do."""
    ways = [(_first_name(result), [level.drafted for level in result.levels])]
    plain = [level.plain for level in result.levels if level.plain is not None]
    if plain:
        ways.append(("plain", plain))
    levels = [level.concurrency for level in result.levels]

    def over(id_: str, title: str, unit: str, value: Any) -> Chart:
        traces = tuple(
            line(name, [m.concurrency for m in found], [value(m) for m in found]) | _MARKED
            for name, found in ways
        )
        return Chart(id_, "bench", title, traces, _marked("requests in flight", unit, levels))

    charts = [
        over("bench-speed", "Tokens per second", "tokens/s", lambda m: m.tokens_per_second),
        over("bench-first", "Time to first token, median", "ms",
             lambda m: 1000 * m.first_token.p50 if m.first_token else None),
        over("bench-pace", "Time per token, median", "ms",
             lambda m: 1000 * m.per_token.p50 if m.per_token else None),
    ]  # fmt: skip
    longest = max((_num_positions(level) for level in result.levels), default=0)
    rates = [
        line(f"concurrency {level.concurrency}", list(range(1, 1 + len(found))), list(found)) | _MARKED
        for level in result.levels
        if level.drafted.speculation is not None and level.drafted.speculation.rounds
        and (found := level.drafted.speculation.unconditional_rates)
    ]  # fmt: skip
    if rates:
        charts.append(
            Chart("bench-rates", "bench", "Accepted at each position, of all rounds", tuple(rates),
                  _marked("position", "share", range(1, longest + 1)))
        )  # fmt: skip
    drafts = range(2 * longest + 1)
    choices = [
        line(f"concurrency {level.concurrency}", [c.num_drafts for c in level.advice.choices],
             [c.tokens_per_second for c in level.advice.choices]) | _MARKED
        for level in result.levels if level.advice is not None
    ]  # fmt: skip
    if choices:
        charts.append(
            Chart("bench-choices", "bench", "Tokens per second of one answer, by number of drafts",
                  tuple(choices), _marked("drafts a round (0: no drafter)", "tokens/s", drafts))
        )  # fmt: skip
    return charts


def _num_positions(level: BenchLevel) -> int:
    speculation = level.drafted.speculation
    return len(speculation.unconditional_rates) if speculation and speculation.rounds else 0


def _marked(x: str, y: str, values: Sequence[int]) -> dict[str, Any]:
    """Axes whose lower one is marked at these whole numbers only."""
    layout = axes(x, y, zero=True)
    layout["xaxis"] |= {"tickvals": list(values)}
    return layout


def _sentences(told: Sequence[tuple[str, str]]) -> Table:
    return Table("", (), tuple((Cell(what), Cell(text)) for what, text in told))


def _cell(value: object) -> Cell:
    text = str(value)
    return Cell(text, number=not text.strip("0123456789.,- "))
