"""What is there was made by another recipe: refused, with the words that go on with it."""

from __future__ import annotations

from eyas.base.errors import RecipeChanged
from eyas.pipeline.attempt import Attempt, given_to_last_run
from eyas.stages.project import Project
from eyas.stages.protocol import Stage


def refuse_stale(project: Project, stage: Stage, attempt: Attempt) -> None:
    """Raise RecipeChanged when a stage's output was made by another recipe.

    Args:
        attempt: the one that refuses; what the one before it was given by ``--set`` may be all that lacks.
    """
    view = stage.look(project)
    if view.state != "stale":
        return
    given = given_to_last_run(project.layout.logs, before=attempt.number)
    forgotten = given is not None and not set(given.values) <= set(project.overrides)
    before = f"eyas run {given.words} (as {given.attempt} was given), or " if given and forgotten else ""
    raise RecipeChanged(
        f"{stage.name}: what is there was made by another recipe",
        where=", ".join(str(path) for path in stage.writes(project)),
        why="; ".join(view.differences),
        hint=f"{before}take the change back, or: eyas run --redo {stage.name} (the old output is set aside)",
    )
