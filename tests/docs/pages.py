"""Pages whose commands are carried out.

Fenced ``console`` blocks hold commands (``$ ``, continued by ``> ``) and what they show; ``sh`` blocks hold
commands alone. All commands of a page run in one shell. A command has to end with 0, or with the code that
its comment names: ``# exit code 14``. What it shows has to follow word by word and line by line, except:

- any number (with its unit) stands for any other, and one thing for several;
- any run of spaces or rules stands for any other;
- ``...`` stands for any text; a line of its own stands for any lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"# exit code (\d+)\s*$")
_UNIT = r"(?: ?(?:bytes|[kMGT]?B|ms|min|s|h|d|%)(?![a-zA-Z])|[kMGT](?=/s))?"
_NUMBER = re.compile(rf"\d+(?:,\d{{3}})*(?:\.\d+)?(?:e[-+]?\d+)?{_UNIT}(?: \d+{_UNIT})*")
_END = "eyas-page-command-ended"
_COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class Step:
    """One command of a page; ``shown`` is None where the page shows nothing of it."""

    line: int
    command: str
    code: int
    shown: tuple[str, ...] | None


def steps_of(text: str) -> Iterator[Step]:
    """The commands of a page in order."""
    for block in _FENCE.finditer(text):
        line = text.count("\n", 0, block.start()) + 2
        if block[1] == "sh":
            yield Step(line, block[2], _code(block[2]), None)
            continue
        command, shown, start = "", [], line
        for number, row in enumerate(block[2].splitlines(), line):
            if row.startswith("$ "):
                if command:
                    yield Step(start, command, _code(command), tuple(shown))
                command, shown, start = row[2:], [], number
            elif (row == ">" or row.startswith("> ")) and not shown:
                command += "\n" + row[2:]
            else:
                shown.append(row)
        yield Step(start, command, _code(command), tuple(shown))


def _code(command: str) -> int:
    found = _CODE.search(command)
    return int(found[1]) if found else 0


def loose(line: str) -> str:
    """A line as it is compared: ``1 segment`` is as good as ``6 segments``."""
    counted = re.sub(r"# ([a-z]+?)s\b", r"# \1", _NUMBER.sub("#", line))
    return " ".join(re.sub(r"[─━]+", "─", counted).split())


def first_difference(shown: tuple[str, ...], real: list[str]) -> str | None:
    """The first line of a page that what was really shown does not have in its place; None when all fit."""
    left = "".join(f"{text}\n" for line in real if (text := loose(line)))
    pattern = ""
    for line in shown:
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        elif wanted := loose(line):
            pattern += ".*".join(re.escape(part) for part in wanted.split("...")) + r"\n"
            if re.match(pattern, left) is None:
                return line
    return None if re.fullmatch(pattern, left) else "(the page ends here, and there is more)"


class PageFailed(AssertionError):
    """A page does not do what it says."""


def run_page(page: Path, folder: Path, replaced: dict[str, str], environment: dict[str, str]) -> int:
    """Carry a page out in ``folder``; returns how many commands it had.

    Args:
        replaced: what stands on the page, and what is put in its place here (a path, a size).

    Raises:
        PageFailed: a command ended or showed otherwise; the message has page, line and what was shown.
    """
    text = page.read_text(encoding="utf-8")
    for old, new in replaced.items():
        assert old in text, f"{page.name} does not say {old} any more"
        text = text.replace(old, new)
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    count = 0
    try:
        for step in steps_of(text):
            code, real = _carried_out(shell, step.command)
            count += 1
            if os.environ.get("EYAS_SHOW_PAGES"):
                print(f"$ {step.command}", *real, sep="\n")
            place = f"{page.name}, line {step.line}: {step.command}"
            said = "\n".join(real)
            if code != step.code:
                raise PageFailed(f"{place}\nended with {code}, not {step.code}:\n{said}")
            if step.shown is not None and (line := first_difference(step.shown, real)) is not None:
                raise PageFailed(f"{place}\ndoes not show: {line}\nit shows:\n{said}")
    finally:
        _end(shell)
        shell.communicate()
    return count


def _end(shell: subprocess.Popen[str]) -> None:
    """Kill the shell and what it left in the background."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)


def _carried_out(shell: subprocess.Popen[str], command: str) -> tuple[int, list[str]]:
    assert shell.stdin is not None
    assert shell.stdout is not None
    watchdog = threading.Timer(_COMMAND_SECONDS, _end, [shell])
    watchdog.start()
    shell.stdin.write(f"{{ {command}\n}} </dev/null; code=$?; echo; echo {_END} $code\n")
    shell.stdin.flush()
    lines: list[str] = []
    try:
        for line in shell.stdout:
            if line.startswith(_END):
                return int(line.split()[1]), lines[:-1] if lines and not lines[-1] else lines
            lines.append(line.rstrip("\n"))
    finally:
        watchdog.cancel()
    said = "\n".join(lines)
    raise PageFailed(f"the shell ended, or was ended after {_COMMAND_SECONDS:.0f} s, in: {command}\n{said}")
