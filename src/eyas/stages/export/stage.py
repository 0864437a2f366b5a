"""The light half of export."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.base.files import read_json
from eyas.base.hashing import recipe_differences
from eyas.base.seal import is_sealed, read_seal
from eyas.export.layouts import FURTHER_LAYOUTS, Layout
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
    """Writes the final checkpoint in the layouts that engines load."""

    name = "export"
    redone_when_stale = True
    work = "eyas.stages.export.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.checkpoints, project.layout.vocabulary, project.layout.evaluation)

    def folders(self, project: Project) -> dict[Layout, Path]:
        """Where each layout lies: the common one, those that are asked for, and those that are there."""
        common = project.layout.exports / project.config.export.name
        found: dict[Layout, Path] = {"both": common}
        for layout in FURTHER_LAYOUTS:
            folder = common.with_name(f"{common.name}-{layout}")
            if layout in project.config.export.to or is_sealed(folder):
                found[layout] = folder
        return found

    def writes(self, project: Project) -> tuple[Path, ...]:
        return tuple(self.folders(project).values())

    def look(self, project: Project) -> StageView:
        checkpoint = final_checkpoint(project)
        if checkpoint is None:
            return StageView(self.name, "waiting", unit="exports")
        folders = self.folders(project)
        sealed = [folder for folder in folders.values() if is_sealed(folder)]
        wanted = export_recipe(project, checkpoint)
        differences: list[str] = []
        for folder in sealed:
            found = recipe_differences(read_seal(folder)["about"].get("recipe", {}), wanted)
            differences += [line for line in found if line not in differences]
        detail: dict[str, object] = {"folder": str(folders["both"])}
        state: StageState = "stale" if differences else "done"
        if not differences and len(sealed) < len(folders):
            state = "pending"
        return StageView(self.name, state, len(sealed), len(folders), "exports", detail, tuple(differences))

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        return [
            damage
            for folder in self.folders(project).values()
            for damage in sealed_damages(folder, deep=deep)
        ]
