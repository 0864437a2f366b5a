"""Edits of the engine's source: applied while states are captured, restored after."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene
from eyas.stages.extract.stage import ExtractStage
from eyas.targets.serving.patches import Patches, PatchView


@dataclass(frozen=True)
class PatchFacts:
    """Every declared patch, and whether capturing still needs it."""

    views: tuple[PatchView, ...]
    needed: bool


def patches_of(scene: Scene) -> Patches:
    """The declared patches of the scene's project."""
    project = scene.project
    return Patches(project.config.serve, project.layout.root, project.layout.state / "patches")


def look(scene: Scene) -> PatchFacts:
    patches = patches_of(scene)
    if not patches.names():
        return PatchFacts((), False)
    return PatchFacts(tuple(patches.look(name) for name in patches.names()), _capturing_is_left(scene))


def _capturing_is_left(scene: Scene) -> bool:
    """Whether states are to be captured, now or once the store is mended."""
    damaged = any(finding.part == "store" and finding.is_damage for finding in scene.verification.findings)
    return damaged or not ExtractStage().look(scene.project).finished


def judge(scene: Scene, facts: PatchFacts) -> Line:
    if not facts.views:
        return Line("patches", "skipped", "no edit of an engine's source is declared")
    findings = []
    for view in facts.views:
        seen = (f"{view.path or view.name}: {view.state}, version {view.version}",)
        if view.state in ("drifted", "missing"):
            what = f"patch {view.name}: the engine's file is {view.state}"
            mend = "eyas serve patch status; the engine was upgraded or removed: mend serve.patches"
            findings.append(Finding(f"patch-{view.state}", view.name, "failed", what, seen, mend))
        elif view.state == "not applied" and facts.needed:
            what = f"patch {view.name} is not applied, and states are still to be captured"
            mend = f"eyas serve patch apply {view.name}"
            findings.append(Finding("patch-not-applied", view.name, "failed", what, seen, mend))
        elif view.state == "applied" and not facts.needed and view.applied_at is not None:
            what = f"patch {view.name} is still applied although nothing is to be captured"
            mend = f"eyas serve patch restore {view.name}"
            findings.append(Finding("patch-left", view.name, "warn", what, seen, mend))
    return verdict("patches", findings, f"{len(facts.views)} declared, each as it should be")


CHECK = Check("patches", look, judge)
