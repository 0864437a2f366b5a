"""The light half of evaluate."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.base.checked import require_check
from eyas.base.errors import DataError
from eyas.base.files import read_json
from eyas.base.hashing import recipe_differences
from eyas.stages.digests import sealed_digest
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, StageState, StageView
from eyas.stages.records import final_checkpoint


def evaluation_recipe(project: Project, checkpoint: Path) -> dict[str, object]:
    """All that decides the measured numbers (times excepted).

    Raises:
        DataError: the file of held-out prompts does not exist.
    """
    settings = project.config.evaluate
    if settings.prompts is None:
        prompts = sealed_digest(project.layout.samples)
    else:
        path = project.source_path(settings.prompts)
        if not path.is_file():
            raise DataError(
                "the held-out prompts do not exist", where=path, hint="mend evaluate.prompts in eyas.toml"
            )
        prompts = project.digests.digest(path)
    # without a tree the recipe says nothing of one, as before there were any
    left_out = {"prompts"} if settings.tree is not None else {"prompts", "tree"}
    return {
        "checkpoint": sealed_digest(checkpoint),
        "prompts": prompts,
        **settings.model_dump(mode="json", exclude=left_out),
    }


class EvaluateStage:
    """Measures acceptance length and speed of the trained drafter."""

    name = "evaluate"
    redone_when_stale = True
    work = "eyas.stages.evaluate.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        prompts = project.config.evaluate.prompts
        held_out = project.layout.samples if prompts is None else project.source_path(prompts)
        return (project.layout.checkpoints, held_out)

    def writes(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.evaluation,)

    def look(self, project: Project) -> StageView:
        unit = "prompts"
        checkpoint = final_checkpoint(project)
        if checkpoint is None:
            return StageView(self.name, "waiting", unit=unit)
        report: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            report = dict(read_json(project.layout.evaluation))
        if not report:
            return StageView(self.name, "pending", unit=unit)
        recorded = report.get("recipe")
        differences = tuple(
            recipe_differences(
                recorded if isinstance(recorded, dict) else {}, evaluation_recipe(project, checkpoint)
            )
        )
        count = int(str(report.get("num_prompts", 0)))
        detail = {"acceptance_length": report.get("acceptance_length")}
        state: StageState = "stale" if differences else "done"
        return StageView(self.name, state, count, count, unit, detail, differences)

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        path = project.layout.evaluation
        if not path.exists():
            return []
        try:
            require_check(read_json(path))
        except (OSError, ValueError) as error:
            return [Damage(path, str(error))]
        return []
