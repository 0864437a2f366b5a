"""What everything was made of, as the outputs themselves record it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas import __version__
from eyas.base.files import read_json
from eyas.base.seal import is_sealed, read_seal
from eyas.report.status import BROKEN
from eyas.stages.project import Project
from eyas.stages.records import checkpoint_folders, recorded_capture_recipe


@dataclass(frozen=True)
class Fact:
    """One thing that an output records about its making."""

    group: str
    name: str
    value: str


def provenance(project: Project) -> tuple[Fact, ...]:
    """Facts in the order of the pipeline; what cannot be read is left out."""
    facts = []
    for group, reader in (
        ("target", _target),
        ("data", _data),
        ("store", _store),
        ("drafter", _drafter),
        ("export", _export),
    ):
        with contextlib.suppress(*BROKEN):
            facts += [Fact(group, name, _text(value)) for name, value in reader(project)]
    return (Fact("eyas", "version", __version__), *facts)


def _target(project: Project) -> Iterator[tuple[str, Any]]:
    yield "model", project.config.target.model
    facts = project.resolved.facts
    yield "hidden size", facts.hidden_size
    yield "vocabulary", facts.vocab_size
    recipe = recorded_capture_recipe(project)
    if recipe is not None:
        yield "weights fingerprint", recipe.get("target_fingerprint")


def _data(project: Project) -> Iterator[tuple[str, Any]]:
    layout = project.layout
    folder = layout.prompts if is_sealed(layout.prompts) else layout.samples
    seal = read_seal(folder)
    recipe = dict(seal["about"].get("recipe") or {})
    for source in recipe.get("sources", []):
        yield f"source {source['name']}", source["content"]
    yield "tokenizer", recipe.get("tokenizer")
    yield "max_seq_len", recipe.get("max_seq_len")
    yield "seed", recipe.get("seed")
    yield "prepared at", seal.get("sealed_at")
    for name, value in dict(read_json(layout.answers / "recipe.json")).items():
        if name != "weights":
            yield f"answers {name}", value


def _store(project: Project) -> Iterator[tuple[str, Any]]:
    about = dict(read_json(project.layout.store_recipe))
    yield "recipe", about["recipe_hash"]
    for name in ("aux_layers", "compute_dtype", "store_dtype", "last"):
        yield name, about["recipe"].get(name)


def _drafter(project: Project) -> Iterator[tuple[str, Any]]:
    vocabulary = read_seal(project.layout.vocabulary)["about"]
    yield "draft vocabulary", vocabulary.get("size")
    yield "coverage of supervised tokens", vocabulary.get("coverage")
    newest = checkpoint_folders(project.layout.checkpoints)[-1]
    yield "checkpoint", newest.name
    state = dict(read_json(newest / "state.json"))
    yield "recipe", state.get("recipe_hash")
    for name, value in dict(state["recipe"]["inputs"]["train"]).items():
        yield f"train.{name}", value


def _export(project: Project) -> Iterator[tuple[str, Any]]:
    folder = project.layout.exports / project.config.export.name
    seal = read_seal(folder)
    yield "folder", folder
    yield "sealed at", seal.get("sealed_at")
    for name, entry in dict(seal["files"]).items():
        if name.endswith(".safetensors"):
            yield f"sha256 of {name}", entry["sha256"]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(entry) for entry in value)
    return str(value)
