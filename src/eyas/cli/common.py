"""Options that verbs share."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from cyclopts import Parameter

from eyas.base.layout import Layout
from eyas.pipeline.attempt import may_be_written_down
from eyas.pipeline.given import Given, given_to_last_run, set_words
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
        return ["--project", str(self.project.resolve()), *self.set_words]

    @property
    def set_words(self) -> list[str]:
        """What was given by --set, as it is given again."""
        return [f"--set={value}" for value in self.set]

    def as_last_run(self) -> Common:
        """With `last_given` before what is given now."""
        given = self.last_given
        return self if given is None else replace(self, set=(*given.values, *self.set))

    @property
    def last_given(self) -> Given | None:
        """What the last run was given by --set, if it did not come to its end."""
        return given_to_last_run(Layout(self.project.resolve()))

    @property
    def suffix(self) -> str:
        """What to add to a suggested command so that it finds the same project on the same host."""
        if told := os.environ.get(SUFFIX_VARIABLE):
            return f" {told}"
        host = "" if self.host is None else f" --host {self.host}"
        project = "" if self.project == Path() else f" --project {shlex.quote(str(self.project))}"
        given = set_words([value for value in self.set if may_be_written_down(value)])
        return host + project + (f" {given}" if given else "")
