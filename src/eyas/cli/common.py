"""Options that every verb has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from eyas.stages.project import Project


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every verb.

    Args:
        project: the project folder.
        json: print one JSON object on stdout.
        set: override a value of eyas.toml, as in --set train.lr=1e-4; may be repeated.
    """

    project: Path = Path()
    json: bool = False
    set: tuple[str, ...] = ()

    def open(self) -> Project:
        """The project these options name."""
        return Project.open(self.project, self.set)

    @property
    def words(self) -> list[str]:
        """The options that make another eyas see the same project."""
        return ["--project", str(self.project.resolve()), *(f"--set={value}" for value in self.set)]

    @property
    def suffix(self) -> str:
        """What to add to a suggested command so that it finds the same project."""
        return "" if self.project == Path() else f" --project {self.project}"
