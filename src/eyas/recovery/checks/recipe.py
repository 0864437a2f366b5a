"""Does what is there still belong to the configuration?"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from eyas.base.errors import EyasError
from eyas.pipeline.order import STAGES
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class StaleStage:
    """A stage whose output was made by another recipe, and the fields that differ."""

    name: str
    redone: bool
    differences: tuple[str, ...]


def look(scene: Scene) -> tuple[StaleStage, ...]:
    stale = []
    # without the store's recipe nothing can be said of what was made from the store
    lost = any(f.kind == "recipe_file" for f in scene.verification.findings)
    for stage in STAGES:
        if lost and stage.name in ("extract", "train"):
            continue
        with contextlib.suppress(EyasError, OSError, ValueError):  # damage, which has checks of its own
            view = stage.look(scene.project)
            if view.state == "stale":
                stale.append(StaleStage(stage.name, stage.redone_when_stale, view.differences))
    return tuple(stale)


def judge(scene: Scene, facts: tuple[StaleStage, ...]) -> Line:
    kept = [stage for stage in facts if not stage.redone]
    findings = [
        Finding(
            "recipe-changed",
            stage.name,
            "failed",
            f"{stage.name} was made by another recipe: {stage.differences[0]}",
            stage.differences,
            mend=f"take the change back, or: eyas run --redo {stage.name}",
        )
        for stage in kept
    ]
    redone = [stage.name for stage in facts if stage.redone]
    fine = "every output belongs to the configuration"
    if redone:
        fine = f"{', '.join(redone)}: made by another recipe, redone by the next run"
    evidence = [f"{stage.name}: {difference}" for stage in facts for difference in stage.differences]
    return verdict("recipe", findings, fine, evidence)


CHECK = Check("recipe", look, judge)
