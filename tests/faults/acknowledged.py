"""What a child had been told is stored, whatever became of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.store.ledger import Commit, Ledger


def acknowledging(path: Path) -> Callable[[], None]:
    """A plan: the ids of every committed segment are appended to ``path``, which is on another disk."""

    def plant() -> None:
        real = Ledger.commit_segment

        def commit(self: Ledger, *arguments: Any, **options: Any) -> Commit:
            done = real(self, *arguments, **options)
            with open(path, "a") as file:
                file.write("".join(f"{name}\n" for name in done.stored))
            return done

        Ledger.commit_segment = commit  # type: ignore[method-assign]

    return plant


def acknowledged(path: Path) -> set[str]:
    """What a killed or failed child had been told is stored."""
    return set(path.read_text().splitlines()) if path.exists() else set()
