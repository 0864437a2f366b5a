"""The one shape of all stages: what it reads and writes, what is left, do it, verify it.

The light half of a stage (this protocol) answers without torch, so that status, a dry run and doctor
are quick. The heavy half is a module whose name is ``work``; its ``run`` is loaded when work begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast

from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.stages.project import Project
from eyas.stages.waves import Feed
from eyas.store.ledger import Ledger

StageState = Literal["waiting", "pending", "partial", "done", "stale", "skipped"]


@dataclass(frozen=True)
class StageView:
    """Where a stage stands.

    ``waiting``: an earlier stage has to finish first. ``stale``: its output was made by another
    recipe; ``differences`` says which fields. ``skipped``: the configuration switches it off.
    ``done`` and ``total`` count ``unit``; ``total`` is None while it is not known.
    """

    name: str
    state: StageState
    done: int = 0
    total: int | None = None
    unit: str = ""
    detail: dict[str, object] = field(default_factory=dict)
    differences: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.state in ("done", "skipped")


@dataclass(frozen=True)
class Damage:
    """Something that is not what the stage wrote.

    Args:
        path: the smallest thing that is set aside whole and made again: a file or a sealed folder.
        detail: what is wrong with it.
    """

    path: Path
    detail: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.detail}"


@dataclass(frozen=True)
class RunContext:
    """What the work of a stage is given.

    Args:
        feed: of a capture that runs beside training: what it may capture.
    """

    ledger: Ledger
    progress: Progress
    stop: StopFlag
    attempt: int
    feed: Feed | None = None


class Stage(Protocol):
    """One step of the pipeline."""

    @property
    def name(self) -> str:
        """The verb, as on the command line."""

    @property
    def redone_when_stale(self) -> bool:
        """Whether a changed recipe redoes it at once (minutes) or only when asked (hours)."""

    @property
    def work(self) -> str:
        """Dotted name of the module whose ``run(project, context)`` does the work."""

    def reads(self, project: Project) -> tuple[Path, ...]:
        """Inputs, for the plan."""
        ...

    def writes(self, project: Project) -> tuple[Path, ...]:
        """Outputs; redoing the stage sets these aside."""
        ...

    def look(self, project: Project) -> StageView:
        """Where the stage stands, from the folder; changes nothing, imports no torch."""
        ...

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        """What is damaged among the outputs; empty when all is whole.

        Args:
            deep: hash everything; otherwise names and sizes are compared, which a run does each time.
        """
        ...


def run_stage(stage: Stage, project: Project, context: RunContext) -> dict[str, object]:
    """Load a stage's work and do what is left of it; returns the numbers worth reporting."""
    run = cast(Callable[[Project, RunContext], dict[str, object]], import_module(stage.work).run)
    return run(project, context)


def verify(stage: Stage, project: Project) -> list[str]:
    """Faults of a stage's outputs after hashing them; empty when all is whole."""
    return [str(damage) for damage in stage.damages(project, deep=True)]
