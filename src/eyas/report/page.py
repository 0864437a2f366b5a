"""The page: sections and charts as HTML, for the report file and for the dashboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from eyas.report.charts import Chart, charts
from eyas.report.overview import Overview
from eyas.report.sections import project_name, sections
from eyas.report.tables import Cell, Section, Table
from eyas.report.words import at_minute

_LONG_WORD = 28
"""Digests and paths may be broken anywhere; other words stay whole, and a wide table scrolls."""


def asset(name: str) -> str:
    """``page.css`` or ``page.js``."""
    return (files("eyas.report") / "assets" / name).read_text(encoding="utf-8")


def parts(view: Overview) -> dict[str, str]:
    """The inner HTML of each section by id, the title line first (``head``)."""
    drawn = charts(view)
    found = {"head": _head(view)}
    for section in sections(view):
        found[section.id] = section_html(section, [chart for chart in drawn if chart.section == section.id])
    return found


def chart_data(drawn: Sequence[Chart]) -> str:
    """Charts as JSON that may stand inside a script element."""
    plain = [{"id": c.id, "traces": c.traces, "layout": c.layout} for c in drawn]
    return json.dumps(plain, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def body(view: Overview) -> str:
    """Everything inside ``<body>`` but the scripts."""
    found = parts(view)
    links = "".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections(view))
    inner = "".join(f'<section id="{id_}">{html}</section>' for id_, html in found.items() if id_ != "head")
    return f'<header id="head">{found["head"]}</header><nav>{links}</nav><main>{inner}</main>'


def _head(view: Overview) -> str:
    return (
        f"<h1>{escape(project_name(view))}</h1>"
        f'<p class="quiet">target {escape(view.status.target)} · seen {escape(at_minute(view.at))} UTC</p>'
    )


def section_html(section: Section, drawn: Sequence[Chart]) -> str:
    """A section with its charts, without the element around it."""
    html = [f"<h2>{escape(section.title)}</h2>"]
    if section.text:
        html.append(f'<p class="lead">{escape(section.text)}</p>')
    html += [f'<p class="warning">! {escape(warning)}</p>' for warning in section.warnings]
    if section.empty and not section.tables and not drawn:
        html.append(f'<p class="quiet">{escape(section.empty)}</p>')
    tables = [_table(table) for table in section.tables]
    if section.id == "now":
        html += tables
    else:
        html += tables[:1] if section.tables and not section.tables[0].columns else []
        rest = tables[1:] if section.tables and not section.tables[0].columns else tables
        if drawn:
            html.append('<div class="charts">' + "".join(_figure(chart) for chart in drawn) + "</div>")
        html += rest
    return "".join(html)


def _figure(chart: Chart) -> str:
    wide = " wide" if chart.section in ("timeline", "extraction") else ""
    title = escape(chart.title)
    return (
        f'<figure class="chart{wide}"><figcaption>{title}</figcaption>'
        f'<div class="plot" id="chart-{escape(chart.id)}" role="img" aria-label="{title}"></div></figure>'
    )


def _table(table: Table) -> str:
    kind = _kind(table)
    opening = f'<table class="{kind}">' if kind else "<table>"
    html = [f"<h3>{escape(table.title)}</h3>" if table.title else "", f'<div class="scroll">{opening}']
    if table.columns:
        numeric = [
            bool(table.rows) and all(row[i].number for row in table.rows) for i in range(len(table.columns))
        ]
        heads = zip(table.columns, numeric, strict=True)
        html.append(
            "<thead><tr>" + "".join(_headcell(name, right) for name, right in heads) + "</tr></thead>"
        )
    html.append("<tbody>")
    for row in table.rows:
        first = "th" if not table.columns else "td"
        html.append(
            "<tr>"
            + "".join(
                _cell(cell, first if i == 0 else "td", table.columns[i] if table.columns else "")
                for i, cell in enumerate(row)
            )
            + "</tr>"
        )
    return "".join([*html, "</tbody></table></div>"])


def _kind(table: Table) -> str:
    """How a table is laid out where there is little room: a wide one gives up its columns."""
    if not table.columns:
        return "facts"
    if table.columns[0] == "stage":
        return "stages"
    return "wide" if len(table.columns) > 3 or table.columns[0].startswith("when") else ""


def _headcell(name: str, right: bool) -> str:
    return f'<th class="number">{escape(name)}</th>' if right else f"<th>{escape(name)}</th>"


def _cell(cell: Cell, tag: str, column: str) -> str:
    """A cell; where there is no room for columns, its column's name stands before it."""
    kind = "number" if cell.number else ""
    if cell.key.endswith(".state"):
        kind = f"state {cell.text}"
    elif max((len(word) for word in cell.text.split()), default=0) > _LONG_WORD:
        kind = "long"
    marks = f' class="{escape(kind)}"' if kind else ""
    if column:
        marks += f' data-column="{escape(column)}"'
    if cell.key:
        marks += f' data-key="{escape(cell.key)}" data-value="{escape(json.dumps(cell.value))}"'
    return f"<{tag}{marks}>{escape(cell.text)}</{tag}>"
