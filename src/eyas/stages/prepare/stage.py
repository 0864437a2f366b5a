"""The light half of prepare."""

from __future__ import annotations

from pathlib import Path

from eyas.base.errors import DataError
from eyas.base.hashing import recipe_differences
from eyas.base.seal import is_sealed, read_seal
from eyas.stages.digests import tokenizer_digest
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, StageView
from eyas.stages.records import sealed_damages

SAMPLE_FORMAT = 1
"""Raised whenever the same conversations would give other samples."""


def prepare_recipe(project: Project) -> dict[str, object]:
    """All that decides which prompts and samples come out.

    Raises:
        DataError: a source file does not exist.
    """
    config, data = project.config, project.config.data
    sources = []
    for source in data.sources:
        path = project.source_path(source.path)
        if not path.is_file():
            raise DataError(
                f"a data source does not exist: {source.path}",
                where=path,
                hint="mend data.sources in eyas.toml; relative paths count from the project folder",
            )
        sources.append(
            {
                "name": source.name or path.name.split(".")[0],
                "content": project.digests.digest(path),
                "limit": source.limit,
                "share": source.share,
                "domain": source.domain,
            }
        )
    return {
        "format": SAMPLE_FORMAT,
        "sources": sources,
        "max_seq_len": data.max_seq_len,
        "too_long": data.too_long,
        "validation": data.validation,
        "on_unreadable": data.on_unreadable,
        "seed": data.seed,
        "regenerate": config.regenerate.enabled,
        "room_for_answer": config.regenerate.max_new_tokens if config.regenerate.enabled else 0,
        "tokenizer": tokenizer_digest(project.resolved.model, project.digests),
    }


class PrepareStage:
    """Reads the sources, renders them with the target's template, splits and counts them."""

    name = "prepare"
    redone_when_stale = True
    work = "eyas.stages.prepare.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        return tuple(project.source_path(source.path) for source in project.config.data.sources)

    def writes(self, project: Project) -> tuple[Path, ...]:
        layout = project.layout
        return (layout.prompts if project.config.regenerate.enabled else layout.samples,)

    def look(self, project: Project) -> StageView:
        (folder,) = self.writes(project)
        unit = "conversations"
        if not is_sealed(folder):
            return StageView(self.name, "pending", unit=unit)
        about = read_seal(folder)["about"]
        recipe, wanted = about.get("recipe", {}), prepare_recipe(project)
        done = int(about.get("num_conversations", 0))
        differences = tuple(recipe_differences(recipe, wanted))
        return StageView(
            self.name, "stale" if differences else "done", done, done, unit, differences=differences
        )

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        (folder,) = self.writes(project)
        return sealed_damages(folder, deep=deep)
