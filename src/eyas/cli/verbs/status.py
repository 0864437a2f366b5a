"""``eyas status``: one look, or a live one."""

from __future__ import annotations

import json
import shutil
import sys
import time

from eyas.base.errors import UsageError
from eyas.cli.common import Common
from eyas.cli.output import next_command, print_json
from eyas.cli.screens import status_lines
from eyas.report.status import ProjectStatus, project_status

_NARROW, _WIDE = 40, 160


def status(
    *,
    watch: bool = False,
    every: float = 2.0,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Where every stage stands, what runs, what is set aside, and what comes next.

    Args:
        watch: stay and look again, until Ctrl-C; with --json, one object a line.
        every: seconds between two looks of --watch.
    """
    if every <= 0:
        raise UsageError("--every has to be above 0", hint="eyas status --watch --every 2")
    if watch:
        return _watch(common, every)
    view = _look(common)
    if common.json:
        print_json(view.as_dict())
        return 0
    print("\n".join(status_lines(view, _width())))
    next_command(view.next_command)
    return 0


def _look(common: Common) -> ProjectStatus:
    common = common.as_last_run()
    return project_status(common.open(), common.suffix)


def _width() -> int:
    """Columns of the terminal; what goes to a file is not cut."""
    if not sys.stdout.isatty():
        return 10_000
    return min(_WIDE, max(_NARROW, shutil.get_terminal_size().columns))


def _watch(common: Common, every: float) -> int:
    """Look again and again; ends with Ctrl-C, which is no error here."""
    try:
        if common.json or not sys.stdout.isatty():
            while True:
                view = _look(common)
                text = _one_line(view) if common.json else "\n".join([*_screen(view, _width()), ""])
                sys.stdout.write(text + "\n")
                sys.stdout.flush()
                time.sleep(every)
        _live(common, every)
    except KeyboardInterrupt:
        return 0
    return 0


def _live(common: Common, every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            view = _look(common)
            live.update(Text("\n".join(_screen(view, _width())), no_wrap=True), refresh=True)
            time.sleep(every)


def _screen(view: ProjectStatus, width: int) -> list[str]:
    following = view.next_command
    return [*status_lines(view, width), "", f"next: {following}" if following else "nothing to do"]


def _one_line(view: ProjectStatus) -> str:
    return json.dumps(view.as_dict(), ensure_ascii=False, default=str)
