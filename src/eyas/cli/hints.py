"""Commands in messages, so written that they work where the reader stands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable


def at_project(text: str, project: str | None, verbs: Iterable[str]) -> str:
    """The same text, its commands with ``--project``; as it is when they have it, or none was given.

    Args:
        text: a hint that may hold commands, ``eyas run`` say, between other words.
        project: what ``--project`` was on the command line.
        verbs: the verbs that take it.
    """
    if project is None or "--project" in text:
        return text
    known = "|".join(sorted(map(re.escape, verbs), key=len, reverse=True))
    option = f" --project {shlex.quote(project)}"
    return re.sub(rf"\beyas (?:{known})(?![\w-])", lambda found: found.group() + option, text)
