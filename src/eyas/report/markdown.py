"""The report as Markdown: the tables of the page, for a terminal, a pull request or a chat."""

from __future__ import annotations

from eyas.report.overview import Overview
from eyas.report.sections import project_name, sections
from eyas.report.tables import Section, Table
from eyas.report.words import at_minute


def markdown(view: Overview) -> str:
    """The whole report; charts are left to the HTML form."""
    parts = [f"# {_text(project_name(view))}\n\nTarget `{view.status.target}`, {at_minute(view.at)} UTC.\n"]
    parts += [_section(section) for section in sections(view)]
    return "\n".join(parts)


def _section(section: Section) -> str:
    parts = [f"## {section.title}\n"]
    if section.text:
        parts.append(f"{_text(section.text)}\n")
    if section.warnings:
        parts.append("\n".join(f"- **{_text(warning)}**" for warning in section.warnings) + "\n")
    if section.empty and not section.tables:
        parts.append(f"{section.empty}\n")
    parts += [_table(table) for table in section.tables]
    return "\n".join(parts)


def _table(table: Table) -> str:
    columns = table.columns or ("", "")
    numeric = [bool(table.rows) and all(row[i].number for row in table.rows) for i in range(len(columns))]
    lines = [f"### {table.title}\n"] if table.title else []
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|" + "|".join("---:" if right else "---" for right in numeric) + "|")
    lines += ["| " + " | ".join(_text(cell.text) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Text that cannot be taken for markup or end a cell."""
    flat = " ".join(text.split())
    for sign in "\\`*_[]<>|#":
        flat = (
            flat.replace(sign, "\\" + sign)
            if sign not in "<>"
            else flat.replace(sign, {"<": "&lt;", ">": "&gt;"}[sign])
        )
    return flat
