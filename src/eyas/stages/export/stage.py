"""The light half of export."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.base.files import read_json
from eyas.base.hashing import recipe_differences
from eyas.base.seal import is_sealed, read_seal
from eyas.stages.digests import sealed_digest
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, StageState, StageView
from eyas.stages.records import final_checkpoint, sealed_damages

EXPORT_FORMAT = 1


def export_recipe(project: Project, checkpoint: Path) -> dict[str, object]:
    """All that decides an export's content."""
    evaluation = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        evaluation = read_json(project.layout.evaluation)["recipe"]
    return {
        "format": EXPORT_FORMAT,
        "checkpoint": sealed_digest(checkpoint),
        "evaluation": evaluation,
    }


class ExportStage:
    """Writes the final checkpoint in the layout that engines load."""

    name = "export"
    redone_when_stale = True
    work = "eyas.stages.export.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.checkpoints, project.layout.vocabulary, project.layout.evaluation)

    def folder(self, project: Project) -> Path:
        """Where the export lies."""
        return project.layout.exports / project.config.export.name

    def writes(self, project: Project) -> tuple[Path, ...]:
        return (self.folder(project),)

    def look(self, project: Project) -> StageView:
        checkpoint = final_checkpoint(project)
        if checkpoint is None:
            return StageView(self.name, "waiting", unit="exports")
        folder = self.folder(project)
        if not is_sealed(folder):
            return StageView(self.name, "pending", 0, 1, "exports")
        recorded = read_seal(folder)["about"].get("recipe", {})
        differences = tuple(recipe_differences(recorded, export_recipe(project, checkpoint)))
        detail: dict[str, object] = {"folder": str(folder)}
        state: StageState = "stale" if differences else "done"
        return StageView(self.name, state, 1, 1, "exports", detail, differences)

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        return sealed_damages(self.folder(project), deep=deep)
