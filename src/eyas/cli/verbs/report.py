"""``eyas report``: everything about a project in one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from eyas.base.files import write_atomic
from eyas.base.units import format_bytes
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json
from eyas.report.overview import overview


def report(
    *,
    format: Literal["html", "md"] = "html",
    output: Path | None = None,
    stdout: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Write what the project holds and how it came about: one file that opens offline.

    Args:
        format: html (tables and charts) or md (tables).
        output: where to; reports/report.html or .md of the project when left out.
        stdout: print it instead of writing a file.
    """
    common = common.as_last_run()
    project = common.open()
    view = overview(project, common.suffix)
    if format == "html":
        from eyas.report.html import html

        text = html(view)
    else:
        from eyas.report.markdown import markdown

        text = markdown(view)
    if stdout:
        sys.stdout.write(text)
        return 0
    path = output or project.layout.reports / f"report.{format}"
    write_atomic(path, text)
    if common.json:
        print_json({"path": str(path), "bytes": len(text.encode()), "report": view.as_dict()})
        return 0
    note(f"{path}, {format_bytes(len(text.encode()))}")
    next_command(view.status.next_command)
    return 0
