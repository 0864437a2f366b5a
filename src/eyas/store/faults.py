"""What a scrub finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FaultKind = Literal[
    "missing",  # the ledger has a segment that the folder has not
    "size",  # a file is longer or shorter than the ledger says
    "header",  # a segment's header, length or name is not what was written
    "content",  # a tensor or a sample's identity is not what was written
    "recipe",  # a segment was captured with another recipe
    "format",  # a newer eyas wrote it
    "ledger",  # the ledger cannot be read, or disagrees with segments or samples
    "recipe_file",  # store.json is missing or damaged
    "foreign",  # a file that eyas did not write
    "unknown",  # a segment that the ledger does not have yet
    "temporary",  # what a killed writer left
    "released",  # a segment whose samples are over; the next run removes it
]

_INFORMATION = frozenset({"unknown", "temporary", "released"})


@dataclass(frozen=True)
class Fault:
    """Something in the store that is not as it was written.

    Args:
        path: the file it is about.
        detail: one sentence.
        sample_ids: the stored samples that it touches.
    """

    path: Path
    kind: FaultKind
    detail: str
    sample_ids: tuple[str, ...] = ()

    @property
    def is_damage(self) -> bool:
        """Whether something was lost; leftovers and segments to be adopted are not damage."""
        return self.kind not in _INFORMATION

    def as_dict(self) -> dict[str, object]:
        """The fault as ``--json`` prints it."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "detail": self.detail,
            "sample_ids": list(self.sample_ids),
            "is_damage": self.is_damage,
        }
