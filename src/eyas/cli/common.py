"""Options that verbs share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from eyas.stages.project import Project

SUFFIX_VARIABLE = "EYAS_SUFFIX"
"""Set for a verb that is done on another host: how the person who asked for it has to ask again."""


@Parameter(name="*")
@dataclass(frozen=True)
class Apart:
    """Options of a verb that is about no project.

    Args:
        json: print one JSON object on stdout.
    """

    json: bool = False


@Parameter(name="*")
@dataclass(frozen=True)
class Making(Apart):
    """Options of the verb that makes a project.

    Args:
        set: a value of the new eyas.toml, as in --set train.lr=1e-4; may be repeated.
    """

    set: tuple[str, ...] = ()


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every verb that is about a project.

    Args:
        project: the project folder.
        json: print one JSON object on stdout.
        host: do it on this host of eyas.toml, where eyas push has put the project.
        set: override a value of eyas.toml, as in --set train.lr=1e-4; may be repeated.
    """

    project: Path = Path()
    json: bool = False
    host: str | None = None
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
        """What to add to a suggested command so that it finds the same project on the same host."""
        if told := os.environ.get(SUFFIX_VARIABLE):
            return f" {told}"
        host = "" if self.host is None else f" --host {self.host}"
        return host + ("" if self.project == Path() else f" --project {self.project}")
