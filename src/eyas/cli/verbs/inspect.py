"""``eyas inspect``: what a checkpoint is, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

from eyas.cli.common import Common


def inspect(folder: Path, *, target: Path | None = None, common: Common = Common()) -> int:  # noqa: B008
    """Say what an export or checkpoint is and what is wrong with it.

    Args:
        folder: an export, a checkpoint, or a drafter from elsewhere.
        target: folder of its target, to compare sizes, positions and head rows with.
    """
    raise SystemExit(f"{folder} {target} {common}")
