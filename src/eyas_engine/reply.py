"""What a server says in its reply about a dump."""

from __future__ import annotations

from typing import Any

from eyas_engine import PROTOCOL
from eyas_engine.settings import EngineSettings


def echo(
    settings: EngineSettings, *, name: object, rows: int, last: str, engine: str, error: str | None = None
) -> dict[str, Any]:
    """The table that stands in the reply under ``eyas``; with ``error`` no file will come."""
    said: dict[str, Any] = {
        "protocol": PROTOCOL,
        "name": name,
        "rows": rows,
        "dir": str(settings.directory),
        "layers": list(settings.layers),
        "last": last,
        "engine": engine,
    }
    if error is not None:
        said["error"] = error
    return said
