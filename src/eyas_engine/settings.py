"""What a server is told about dumping: where, which layers, and how much room."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTINGS_VARIABLE = "EYAS_ENGINE_SETTINGS"
"""Environment variable with the settings as JSON, for engines that pass no table to a plugin."""

NAME_PATTERN = re.compile(r"[a-z0-9-]{8,120}")
"""Names that a client may give a dump: never a path, never hidden."""


@dataclass(frozen=True)
class EngineSettings:
    """How one server dumps.

    Args:
        directory: an existing folder that belongs to this server alone.
        layers: aux layers, counted as "after k decoder layers", in the order of the dump's columns.
        num_layers: decoder layers of the target; this id is the state before the final norm.
        server_started: unix seconds, the same text as in the folder's owner file.
        limit_bytes: most bytes of finished dumps in the folder; 0: only the filesystem bounds it.
        full_share: share of what dumps can hold at which more are refused, as :class:`Room` counts it.
        num_threads: threads that write.
        pending_bytes: most bytes of states copied out and not yet written.
    """

    directory: Path
    layers: tuple[int, ...]
    num_layers: int
    server_started: str
    limit_bytes: int = 0
    full_share: float = 0.8
    num_threads: int = 4
    pending_bytes: int = 4 << 30

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> EngineSettings:
        """Read a table that `as_table` made. Raises KeyError, TypeError or ValueError."""
        return cls(
            directory=Path(table["directory"]),
            layers=tuple(int(k) for k in table["layers"]),
            num_layers=int(table["num_layers"]),
            server_started=str(table["server_started"]),
            limit_bytes=int(table.get("limit_bytes", 0)),
            full_share=float(table.get("full_share", 0.8)),
            num_threads=int(table.get("num_threads", 4)),
            pending_bytes=int(table.get("pending_bytes", 4 << 30)),
        )

    @classmethod
    def from_environment(cls) -> EngineSettings:
        """Settings of this process. Raises KeyError or ValueError when there are none."""
        return cls.from_table(json.loads(os.environ[SETTINGS_VARIABLE]))

    def as_table(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        return {
            "directory": str(self.directory),
            "layers": list(self.layers),
            "num_layers": self.num_layers,
            "server_started": self.server_started,
            "limit_bytes": self.limit_bytes,
            "full_share": self.full_share,
            "num_threads": self.num_threads,
            "pending_bytes": self.pending_bytes,
        }


def check_name(name: object) -> str | None:
    """Why ``name`` cannot name a dump; None when it can."""
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        return "bad-name: a dump's name has 8 to 120 characters of a-z, 0-9 and -"
    return None
