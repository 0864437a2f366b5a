"""Names of dumps: unique for ever, and telling whose they are."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from pathlib import Path
from typing import Literal

NAME = re.compile(r"[a-z0-9-]{8,120}")
"""What the protocol allows."""


def project_tag(root: Path) -> str:
    """Eight characters that all dumps of a project begin with."""
    return hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]


class DumpNames:
    """Gives names ``TAG-RUN-NUMBER-SAMPLE`` and knows what became of each.

    Args:
        tag: of the project; two projects that share a dump folder never touch each other's dumps.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._open: set[str] = set()

    def new(self, sample: str) -> str:
        """A name for one more request about ``sample``."""
        word = re.sub(r"[^a-z0-9]", "", sample.lower())[:12] or "sample"
        name = f"{self.tag}-{self.run}-{next(self._numbers):x}-{word}"
        self._open.add(name)
        return name

    def close(self, name: str) -> None:
        """The request of this name is over, whatever came of it."""
        self._open.discard(name)

    def of_project(self, name: str) -> bool:
        """Whether a dump of this name belongs to this project, of any run."""
        return name.startswith(f"{self.tag}-")

    def of_run(self, name: str) -> bool:
        """Whether this process asked for it."""
        return name.startswith(f"{self.tag}-{self.run}-")

    def kind(self, name: str) -> Literal["swapped", "stale", "foreign"]:
        """What a dump of this name is when another one was asked for."""
        if name in self._open:
            return "swapped"
        return "stale" if self.of_project(name) else "foreign"
