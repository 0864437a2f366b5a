"""The light half of regenerate."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.base.checked import checked_content
from eyas.base.files import read_json
from eyas.base.hashing import recipe_differences
from eyas.base.seal import is_sealed, read_seal
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, StageView
from eyas.stages.records import sealed_damages
from eyas.stages.regenerate.answers import count_answers, part_fault, part_files

ANSWERS_RECIPE = "recipe.json"


def answers_recipe(project: Project, fingerprint: str, dtype: str) -> dict[str, object]:
    """All that decides an answer besides its prompt.

    Args:
        fingerprint: of the target's weights.
        dtype: resolved arithmetic of the target.
    """
    settings = project.config.regenerate
    return {
        "weights": fingerprint,
        "dtype": dtype,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "end_tokens": list(project.resolved.facts.end_tokens),
    }


_RECIPE_KEYS = frozenset(
    {"weights", "dtype", "max_new_tokens", "temperature", "top_p", "seed", "end_tokens"}
)  # all that recipe.json held before it carried a digest of itself


def recorded_answers_recipe(project: Project) -> dict[str, object] | None:
    """The recipe of the answers on disk; None before the first, and when the file is lost or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return _read_recipe(project)
    return None


def _read_recipe(project: Project) -> dict[str, object]:
    return checked_content(read_json(project.layout.answers / ANSWERS_RECIPE), _RECIPE_KEYS)


def _recipe_damages(project: Project) -> list[Damage]:
    try:
        _read_recipe(project)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [Damage(project.layout.answers / ANSWERS_RECIPE, str(error))]
    return []


class RegenerateStage:
    """Answers every prompt with the target and turns the emitted ids into samples."""

    name = "regenerate"
    redone_when_stale = False
    work = "eyas.stages.regenerate.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.prompts,)

    def writes(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.answers, project.layout.samples)

    def look(self, project: Project) -> StageView:
        unit = "answers"
        layout = project.layout
        if not project.config.regenerate.enabled:
            return StageView(self.name, "skipped", unit=unit, detail={"why": "answers are taken as given"})
        if not is_sealed(layout.prompts):
            return StageView(self.name, "waiting", unit=unit)
        about = read_seal(layout.prompts)["about"]
        total, done = int(about.get("num_turns", 0)), count_answers(layout.answers)
        recorded = recorded_answers_recipe(project)
        if recorded is not None:
            # weights and dtype are compared by the work, which may hash and load
            wanted = answers_recipe(project, str(recorded.get("weights")), str(recorded.get("dtype")))
            if project.config.target.dtype != "auto":
                wanted["dtype"] = project.config.target.dtype
            differences = tuple(recipe_differences(recorded, wanted))
            if differences:
                return StageView(self.name, "stale", done, total, unit, differences=differences)
        elif done:  # the recipe is lost: the work compares what the parts say of it, and writes it anew
            return StageView(self.name, "partial", min(done, total), total, unit)
        if is_sealed(layout.samples):
            made_of = read_seal(layout.samples)["about"].get("prompts")
            if made_of == read_seal(layout.prompts)["about"].get("identity"):
                return StageView(self.name, "done", total, total, unit)
        return StageView(self.name, "partial" if done else "pending", min(done, total), total, unit)

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        if not project.config.regenerate.enabled:
            return []
        found = sealed_damages(project.layout.samples, deep=deep) + _recipe_damages(project)
        for path in part_files(project.layout.answers):
            why = part_fault(path, deep=deep)
            found += [Damage(path, why)] if why else []
        return found
