"""How long work tells what it has done, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener for one stage's work; all numbers are of this attempt.

    ``start`` may be called again when the work turns to another phase.
    """

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        """Work named ``label`` begins: ``total`` units, ``done`` of them from earlier attempts."""

    def advance(self, units: int, **facts: float | int | str) -> None:
        """``units`` more are done; ``facts`` are shown beside (loss, bytes, rate)."""

    def say(self, message: str) -> None:
        """One line that a person should read."""


class SilentProgress:
    """A listener that drops everything."""

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        pass

    def advance(self, units: int, **facts: float | int | str) -> None:
        pass

    def say(self, message: str) -> None:
        pass
