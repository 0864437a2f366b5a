"""A record that cannot be read: by kind, to be counted, and in words, to be mended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.base.errors import DataError

HINT = 'correct the line, or set data.on_unreadable = "skip" to leave such records out, counted'


class Refused(Exception):
    """One record is not understood.

    Args:
        kind: a few words, the same for all such records (``unknown role``).
        detail: what was found in this one.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Unreadable:
    """A record that was refused, and where it stands."""

    path: Path
    line: int
    kind: str
    detail: str
    source: str = ""
    domain: str = ""

    def error(self) -> DataError:
        """The error that ends the stage for this record."""
        return DataError(
            f"a record cannot be read: {self.kind}",
            where=f"{self.path}:{self.line}",
            why=self.detail,
            hint=HINT,
        )
