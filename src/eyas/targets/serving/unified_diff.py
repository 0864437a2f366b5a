"""Applies a unified diff exactly: every context line has to be where the diff says, or nothing is done."""

from __future__ import annotations

import re

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffDoesNotApply(ValueError):
    """The diff is no unified diff of one file, or it was made for another text."""


def apply_diff(text: str, diff: str) -> str:
    """``text`` with ``diff`` applied.

    Args:
        text: the file the diff was made for, line ends and all.
        diff: a unified diff of this one file; its file names are not looked at.

    Raises:
        DiffDoesNotApply: names the line.
    """
    lines = text.splitlines(keepends=True)
    result: list[str] = []
    position, num_hunks = 0, 0
    body = diff.splitlines(keepends=True)
    index = 0
    while index < len(body):
        matched = _HUNK.match(body[index])
        index += 1
        if matched is None:
            continue
        num_hunks += 1
        num_old = int(matched[2]) if matched[2] is not None else 1
        num_new = int(matched[4]) if matched[4] is not None else 1
        # a hunk that takes nothing names the line before the place
        begin = int(matched[1]) - (1 if num_old else 0)
        if begin < position or begin > len(lines):
            raise DiffDoesNotApply(f"hunk {num_hunks} begins at line {begin + 1}, which cannot be")
        result += lines[position:begin]
        position = begin
        while num_old or num_new:
            if index >= len(body):
                raise DiffDoesNotApply(f"hunk {num_hunks} is cut off")
            kind, content = body[index][:1], body[index][1:]
            index += 1
            if index < len(body) and body[index].startswith("\\"):  # no newline at the end of the file
                content, index = content.rstrip("\n"), index + 1
            if kind not in (" ", "-", "+"):
                raise DiffDoesNotApply(f"hunk {num_hunks} has a line that begins with {kind!r}")
            if kind in (" ", "-"):
                if position >= len(lines) or lines[position] != content:
                    raise DiffDoesNotApply(f"line {position + 1} is not what the diff was made for")
                position, num_old = position + 1, num_old - 1
            if kind in (" ", "+"):
                result.append(content)
                num_new -= 1
    if not num_hunks:
        raise DiffDoesNotApply("there is no hunk in it")
    return "".join(result + lines[position:])
