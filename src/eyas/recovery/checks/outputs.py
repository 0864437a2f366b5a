"""Is what the stages wrote still what they wrote? One check for each part, from one verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from eyas.pipeline import verify
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene

_PARTS = {
    # line, part of the verification, code, what it is called
    "samples": ("prepare", "samples-damaged", "prepared data"),
    "answers": ("regenerate", "answers-damaged", "answers and samples"),
    "drafter": ("train", "drafter-damaged", "vocabulary and checkpoints"),
    "evaluation": ("evaluate", "evaluation-damaged", "the evaluation"),
    "exports": ("export", "export-damaged", "exports"),
}


@dataclass(frozen=True)
class PartFacts:
    """What a verification found in one part."""

    findings: tuple[verify.Finding, ...]
    deep: bool
    exists: bool


def look_at(part: str, scene: Scene) -> PartFacts:
    found = scene.verification
    return PartFacts(tuple(f for f in found.findings if f.part == part), found.deep, _exists(scene, part))


def _exists(scene: Scene, part: str) -> bool:
    layout = scene.layout
    places = {
        "prepare": (layout.prompts, layout.samples),
        "regenerate": (layout.answers,),
        "train": (layout.vocabulary, layout.checkpoints),
        "evaluate": (layout.evaluation,),
        "export": (layout.exports,),
    }
    return any(path.exists() for path in places[part])


def judge_part(name: str, code: str, title: str, scene: Scene, facts: PartFacts) -> Line:
    if not facts.exists and not facts.findings:
        return Line(name, "skipped", "nothing written yet")
    by_folder: dict[str, list[verify.Finding]] = {}
    for found in facts.findings:
        by_folder.setdefault(_folder(found.place), []).append(found)
    findings = [_finding(code, place, entries) for place, entries in by_folder.items()]
    how = "every hash" if facts.deep else "names and sizes"
    return verdict(name, findings, f"{title}: {how} as written")


def _folder(place: str) -> str:
    """What is set aside whole: the sealed folder of a file, or the file."""
    parts = place.split("/")
    sealed = {"data": 2, "drafter": 3 if len(parts) > 2 and parts[1] == "checkpoints" else 2, "exports": 2}
    return "/".join(parts[: sealed.get(parts[0], len(parts))]) if parts[1:2] != ["answers"] else place


def _finding(code: str, place: str, entries: Sequence[verify.Finding]) -> Finding:
    first = entries[0]
    inner = first.place.removeprefix(place).strip("/")
    what = f"{place} is damaged: {inner + ': ' if inner else ''}{first.detail}"
    evidence = tuple(f"{entry.place}: {entry.detail}" for entry in entries[:20])
    return Finding(code, place, "damage", what, evidence, detail={"part": first.part, "path": place})


CHECKS = tuple(
    Check(name, partial(look_at, part), partial(judge_part, name, code, title))
    for name, (part, code, title) in _PARTS.items()
)
