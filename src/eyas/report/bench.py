"""What ``eyas bench`` measured, as tables for the terminal and as one HTML page with its charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eyas.report.charts import Chart, axes, line
from eyas.report.html import whole_page
from eyas.report.page import chart_data, section_html
from eyas.report.tables import Cell, Section, Table
from eyas.targets.bench.level import Measured
from eyas.targets.bench.run import BenchLevel, BenchResult

_MARKED = {"mode": "lines+markers"}


def speed_table(result: BenchResult) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: both servers at each concurrency; times in milliseconds."""
    columns = [
        "concurrency", "server", "answers", "tokens/s", "first token p50 ms", "first token p95 ms",
        "per token p50 ms", "per token p95 ms", "acceptance length", "speed-up",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for level in result.levels:
        rows.append(_row("with drafter", level.drafted, level.speedup))
        if level.plain is not None:
            rows.append(_row("plain", level.plain, None))
    return columns, rows


def _row(name: str, found: Measured, speedup: float | None) -> list[Any]:
    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{1000 * value:.1f}"

    first, pace = found.first_token, found.per_token
    length = found.acceptance_length
    return [
        found.concurrency,
        name,
        found.answers,
        f"{found.tokens_per_second:.1f}",
        milliseconds(first.p50 if first else None),
        milliseconds(first.p95 if first else None),
        milliseconds(pace.p50 if pace else None),
        milliseconds(pace.p95 if pace else None),
        "-" if length is None else f"{length:.3f}",
        "-" if speedup is None else f"{speedup:.2f}",
    ]


def summary_lines(result: BenchResult) -> list[str]:
    """What follows from the numbers, a sentence a line."""
    lines = []
    if result.acceptance_length is not None:
        lines.append(f"acceptance length {result.acceptance_length:.3f} by the server's own counts")
    for level in result.levels:
        lines += _level_lines(level)
    return [*lines, *result.notes]


def _level_lines(level: BenchLevel) -> list[str]:
    at = f"at concurrency {level.concurrency}"
    lines = []
    if level.texts is not None:
        later = f", {level.texts.not_compared} later turns not compared" if level.texts.not_compared else ""
        lines.append(f"{at}: {level.texts.equal} of {level.texts.compared} texts are equal{later}")
    if level.advice is not None:
        best, longer = level.advice.best, level.advice.longer
        said = f"{best.num_drafts} drafts" if best.num_drafts else "no drafter"
        trying = f"; {longer.num_drafts} may be worth a try" if longer else ""
        lines.append(
            f"{at}: fastest with {said}, {best.tokens_per_second:.1f} tokens/s an answer by measured cost "
            f"and acceptance{trying}"
        )
    for measured in (level.drafted, level.plain):
        lines += [f"{at}: {warning}" for warning in (measured.warnings if measured else ())]
    return lines


def bench_page(result: BenchResult) -> str:
    """The page; it needs no network."""
    columns, rows = speed_table(result)
    cells = tuple(tuple(_cell(value) for value in row) for row in rows)
    section = Section(
        "bench",
        "Speed and acceptance",
        f"{result.num_prompts} prompts, none asked twice, at most {result.max_tokens} tokens an answer, "
        f"temperature {result.temperature:g}.",
        (Table("", tuple(columns), cells), _sentences(summary_lines(result))),
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
    ways = [("with drafter", [level.drafted for level in result.levels])]
    plain = [level.plain for level in result.levels if level.plain is not None]
    if plain:
        ways.append(("plain", plain))

    def over(id_: str, title: str, unit: str, value: Any) -> Chart:
        traces = tuple(
            line(name, [m.concurrency for m in found], [value(m) for m in found]) | _MARKED
            for name, found in ways
        )
        return Chart(id_, "bench", title, traces, axes("requests in flight", unit, zero=True))

    charts = [
        over("bench-speed", "Tokens per second", "tokens/s", lambda m: m.tokens_per_second),
        over("bench-first", "Time to first token, median", "ms",
             lambda m: 1000 * m.first_token.p50 if m.first_token else None),
        over("bench-pace", "Time per token, median", "ms",
             lambda m: 1000 * m.per_token.p50 if m.per_token else None),
    ]  # fmt: skip
    rates = [
        line(f"concurrency {level.concurrency}", list(range(1, 1 + len(found))), list(found)) | _MARKED
        for level in result.levels
        if level.drafted.speculation is not None and level.drafted.speculation.rounds
        and (found := level.drafted.speculation.unconditional_rates)
    ]  # fmt: skip
    if rates:
        charts.append(
            Chart("bench-rates", "bench", "Accepted at each position, of all rounds", tuple(rates),
                  axes("position", "share", zero=True))
        )  # fmt: skip
    choices = [
        line(f"concurrency {level.concurrency}", [c.num_drafts for c in level.advice.choices],
             [c.tokens_per_second for c in level.advice.choices]) | _MARKED
        for level in result.levels if level.advice is not None
    ]  # fmt: skip
    if choices:
        charts.append(
            Chart("bench-choices", "bench", "Tokens per second of one answer, by number of drafts",
                  tuple(choices), axes("drafts a round (0: no drafter)", "tokens/s", zero=True))
        )  # fmt: skip
    return charts


def _sentences(lines: Sequence[str]) -> Table:
    return Table("In words", ("",), tuple((Cell(text),) for text in lines))


def _cell(value: object) -> Cell:
    text = str(value)
    return Cell(text, number=text.replace(".", "", 1).replace("-", "0").isdigit())
