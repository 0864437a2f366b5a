"""The drafter that training goes on from, when ``train.start_from`` names one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyas.base.errors import ConfigError, ExportMismatch
from eyas.drafter.shape import DrafterShape
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.export.layout import Eagle3Checkpoint, read_eagle3
from eyas.stages.project import Project
from eyas.stages.train.stage import start_digest
from eyas.targets.parts import TargetParts


@dataclass(frozen=True)
class StartingDrafter:
    """A drafter of the engines' layout, proven to fit the target.

    Attributes:
        folder: where it lies.
        digest: what the training recipe holds of it.
        weights: tensors by their checkpoint names.
        notes: lines for a person.
    """

    folder: Path
    digest: str
    shape: DrafterShape
    vocabulary: DraftVocabulary
    weights: dict[str, torch.Tensor]
    notes: tuple[str, ...]


def read_start(project: Project, parts: TargetParts) -> StartingDrafter | None:
    """The drafter that ``train.start_from`` names, or None.

    Raises:
        ConfigError: it was made for another target, other aux layers or another architecture than the
            configuration asks for, or tensors are missing, unknown or misshapen.
        DataError: the folder cannot be read, or its norms are not trained here.
    """
    named = project.config.train.start_from
    if named is None:
        return None
    folder = project.source_path(named)
    checkpoint = read_eagle3(folder)
    try:
        checkpoint.require_whole()
    except ExportMismatch as error:
        raise ConfigError(
            "training cannot go on from this drafter", where=folder, why=error.why, hint=error.hint
        ) from error
    shape = DrafterShape.from_dict(checkpoint.dimensions.as_shape())
    _require_fit(project, folder, shape)
    _require_embedding(folder, checkpoint, parts)
    vocabulary = DraftVocabulary(checkpoint.target_ids.numpy().astype(np.int64), shape.target_vocab_size)
    return StartingDrafter(
        folder,
        start_digest(folder) or "",
        shape,
        vocabulary,
        checkpoint.weights,
        _layer_notes(project, folder, checkpoint),
    )


def _require_fit(project: Project, folder: Path, shape: DrafterShape) -> None:
    facts, asked = project.resolved.facts, project.config.drafter
    pairs: list[tuple[str, object, object]] = [
        ("hidden size", shape.hidden_size, facts.hidden_size),
        ("target hidden size", shape.target_hidden_size, facts.hidden_size),
        ("target vocabulary", shape.target_vocab_size, facts.vocab_size),
        ("aux layers", shape.num_aux, len(project.resolved.aux_layers)),
    ]
    pairs += [
        (f"drafter.{key}", getattr(shape, _SHAPE_NAMES.get(key, key)), value) for key, value in _said(asked)
    ]
    for what, found, wanted in pairs:
        if found != wanted:
            raise ConfigError(
                "training cannot go on from this drafter",
                where=folder,
                why=f"{what} is {found} there and {wanted} here",
                hint="take [drafter] out of eyas.toml, or name another train.start_from",
            )


_SHAPE_NAMES = {"vocab_size": "draft_vocab_size"}


def _said(asked: object) -> list[tuple[str, object]]:
    """Fields of ``[drafter]`` that the configuration sets to something."""
    names: set[str] = getattr(asked, "model_fields_set", set())
    return [(name, getattr(asked, name)) for name in sorted(names) if getattr(asked, name)]


def _require_embedding(folder: Path, checkpoint: Eagle3Checkpoint, parts: TargetParts) -> None:
    own = checkpoint.embedding
    if own is not None and not torch.equal(own.to(torch.bfloat16), parts.embedding.cpu().to(torch.bfloat16)):
        raise ConfigError(
            "training cannot go on from this drafter",
            where=folder,
            why="it brings an embedding of its own that differs from the target's",
        )


def _layer_notes(project: Project, folder: Path, checkpoint: Eagle3Checkpoint) -> tuple[str, ...]:
    wanted, trained = project.resolved.aux_layers, checkpoint.trained_layers
    if trained is None:
        layers = ", ".join(str(layer) for layer in wanted)
        return (
            f"{folder.name} does not say which layers it was trained on; taken for after {layers} layers",
        )
    if trained != wanted:
        raise ConfigError(
            "training cannot go on from this drafter",
            where=folder,
            why=f"it was trained on layers {list(trained)}, the store holds {list(wanted)}",
            hint=f"set extract.aux_layers = {list(trained)} and extract anew",
        )
    return ()
