"""What a run was given by ``--set``: whoever goes on with one that was killed means that run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.base.errors import ConfigError, RecipeChanged
from eyas.base.layout import Layout
from eyas.config.load import load_config
from eyas.pipeline.attempt import recent_events, runs

_REFUSED = RecipeChanged.exit_code
"""Exit code of a run that was told something wrong and did nothing."""


@dataclass(frozen=True)
class Given:
    """What a run was given beside eyas.toml.

    Attributes:
        attempt: its folder's name.
        values: as ``dotted.key=value``.
    """

    attempt: str
    values: tuple[str, ...]

    @property
    def words(self) -> str:
        """As it is typed."""
        return set_words(self.values)


def set_words(values: Sequence[str]) -> str:
    """Overrides as they are typed."""
    return " ".join(f"--set {shlex.quote(value)}" for value in values)


def given_to_last_run(layout: Layout, before: int | None = None) -> Given | None:
    """What the newest run that was not refused was given; None when it came to its end, or was given nothing.

    Args:
        before: only attempts with lower numbers.
    """
    for folder, events in runs(layout.logs, recent_events):
        if before is not None and int(folder.name.rpartition("-")[2]) >= before:
            continue
        end = events[-1] if events[-1]["event"] == "attempt ended" else {}
        if end.get("exit_code") == _REFUSED:
            continue
        values = tuple(str(value) for value in events[0].get("set", ()))
        if not values or end.get("outcome") == "done":
            return None
        try:
            load_config(layout.root, values)
        except ConfigError:  # a log that was damaged, or values that this eyas does not know
            return None
        return Given(folder.name, values)
    return None


def name_what_was_given(error: RecipeChanged, layout: Layout, overrides: Sequence[str], attempt: int) -> None:
    """Say in a refusal's hint what the run before was given, when this one lacks it.

    Args:
        overrides: of the run that is refused; ``attempt`` is its number.
    """
    given = given_to_last_run(layout, before=attempt)
    if given is not None and not set(given.values) <= set(overrides):
        error.hint = f"eyas run {given.words} (as {given.attempt} was given), or {error.hint}"
