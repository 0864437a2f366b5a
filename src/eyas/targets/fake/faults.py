"""Which request goes wrong in which way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eyas.base.errors import UsageError

KINDS: dict[str, str] = {
    "hang": "never replies",
    "slow": "replies late, by ARG seconds (1)",
    "500": "HTTP 500",
    "busy": "HTTP 503",
    "refused": "HTTP 400",
    "reset": "breaks the connection",
    "garbage": "replies with something that is no JSON",
    "no-echo": "replies without the dump's echo, as a server does whose plugin was not loaded",
    "full": "says that its dump folder is full",
    "failed": "leaves an error in the dump's place",
    "no-dump": "promises a dump and writes none",
    "late": "writes the dump ARG seconds (1) after the reply",
    "half": "writes half of the dump's bytes under the final name",
    "flip": "flips a bit in the dump",
    "stale": "puts an earlier request's dump in place, or one made an hour ago",
    "swapped": "puts the dump of another request in place",
    "short": "leaves out the first rows, as a prefix cache does",
    "tokens": "writes the dump of other tokens",
    "wrong-layer": "writes the layers below",
    "wrong-width": "writes states that are narrower",
    "wrong-dtype": "writes states of another dtype",
    "nan": "one state is NaN",
    "infinite": "one state is infinite",
    "zero": "one layer is zero",
    "constant": "one row is constant",
    "wrong-model": "answers as another model, with other states",
    "dies": "dies",
    "returns": "dies and comes back after ARG seconds (1)",
    "endless": "an answer that goes on behind its end",
    "cut": "an answer that claims to have ended and did not",
}
"""Kinds of faults; the last two are of answers, those between ``no-echo`` and ``constant`` of dumps."""

_WORD = re.compile(r"([a-z0-9-]+)@(\d+)(\+?)(?::(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Fault:
    """One line of a schedule: ``KIND@N`` for request N (from 1), ``KIND@N+`` from N on, ``:ARG`` behind."""

    kind: str
    request: int
    onward: bool = False
    argument: float | None = None

    def hits(self, request: int) -> bool:
        return request == self.request or (self.onward and request > self.request)


def parse_fault(text: str) -> Fault:
    """Read ``KIND@N``. Raises UsageError."""
    match = _WORD.fullmatch(text.strip())
    if match is None or match[1] not in KINDS or int(match[2]) < 1:
        raise UsageError(
            f"{text!r} is no fault",
            why="write KIND@N, KIND@N+ or KIND@N:SECONDS",
            hint=f"kinds: {', '.join(KINDS)}",
        )
    return Fault(match[1], int(match[2]), bool(match[3]), float(match[4]) if match[4] else None)


def read_schedule(path: Path) -> list[Fault]:
    """A schedule from a file: one fault a line, or a JSON list of them; ``#`` begins a comment.

    Raises:
        UsageError: the file cannot be read or a line is no fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
        words = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        lines = [str(word).partition("#")[0].strip() for word in words]
    except (OSError, ValueError) as error:
        raise UsageError("the schedule of faults cannot be read", where=path, why=str(error)) from error
    return [parse_fault(line) for line in lines if line]


def fault_of(schedule: Iterable[Fault], request: int) -> Fault | None:
    """The first fault that hits a request."""
    return next((fault for fault in schedule if fault.hits(request)), None)
