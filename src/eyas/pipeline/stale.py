"""What is there was made by another recipe."""

from __future__ import annotations

from eyas.base.errors import RecipeChanged
from eyas.stages.project import Project
from eyas.stages.protocol import Stage, StageView


def refuse_stale(project: Project, stage: Stage, view: StageView) -> None:
    """Raise RecipeChanged when a look at a stage found its output made by another recipe."""
    if view.state == "stale":
        raise RecipeChanged(
            f"{stage.name}: what is there was made by another recipe",
            where=", ".join(str(path) for path in stage.writes(project)),
            why="; ".join(view.differences),
            hint=f"take the change back, or: eyas run --redo {stage.name} (the old output is set aside)",
        )
