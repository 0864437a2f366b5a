"""Sealed training checkpoints: whole, or not there.

A folder ``step-00000123`` holds ``model.safetensors`` (weights as trained, float32 or wider, under the
names that engines load), ``vocabulary.safetensors`` (the draft vocabulary they belong to),
``optimizer.safetensors`` (``average/NAME``, ``square/NAME``, ``count/NAME``,
``aux_sizes``, ``rng/cpu``) and ``state.json``. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.base.errors import EyasError, FormatTooNew, SealBroken
from eyas.base.files import TEMPORARY_SUFFIX, fsync_folder
from eyas.base.seal import is_sealed, require_seal, sealed_folder
from eyas.drafter.model import EagleDrafter
from eyas.drafter.shape import DrafterShape
from eyas.drafter.snapshot import Snapshot, put_optimizer
from eyas.drafter.vocabulary import DraftVocabulary, write_vocabulary
from eyas.drafter.world import World

FORMAT = 2
WAVES_FORMAT = 3
"""Of checkpoints that know of waves; an older eyas must not take them for damaged."""
MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "state.json"
PREFIX = "step-"

SetAside = Callable[[Path, str], None]
"""Moves a damaged checkpoint out of the way, with the reason."""


@dataclass
class TrainingState:
    """Where a run stands; everything but tensors.

    Attributes:
        step: finished optimizer steps, skipped ones included.
        epoch, place: of the next step; ``total_steps`` when all are done.
        best: the best validation so far: ``{"step", "walk_tau", ...}``.
        bad_steps: bad steps in a row.
        recipe: all that determines the weights, with its hash.
        validation: the last validation.
        unvalidated: the validation that is due at this step has not been done: the run was stopped before.
        recent_losses: of the last good steps, newest last (see `eyas.drafter.guards`).
        counters: how often each kind of trouble was met.
        waves_over: waves of samples that are over after ``step``; None when all samples are there throughout.
    """

    step: int
    total_steps: int
    epoch: int
    place: int
    tokens: int
    bad_steps: int
    shape: dict[str, Any]
    recipe: dict[str, Any]
    recipe_hash: str
    schedule: dict[str, Any]
    best: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    recent_losses: list[float] = field(default_factory=list)
    unvalidated: bool = False
    format: int = FORMAT
    waves_over: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """What is written; without a word of waves where there are none."""
        fields = asdict(self)
        if self.waves_over is None:
            del fields["waves_over"]
        return fields


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, read."""

    path: Path
    state: TrainingState
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"{PREFIX}{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Sealed checkpoints by step, oldest first; their content is not checked."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name[len(PREFIX) :].isdigit()]
    return sorted(path for path in found if path.name.startswith(PREFIX) and is_sealed(path))


def save_checkpoint(
    folder: Path, snapshot: Snapshot, state: TrainingState, vocabulary: DraftVocabulary
) -> Path:
    """Write the checkpoint of ``state.step``, in place of one that lacked its validation.

    A crash while one is replaced leaves the one before it.

    Raises:
        OSError: nothing was written.
    """
    path = checkpoint_path(folder, state.step)
    if path.exists():
        _remove(path)
    about = {
        "kind": "checkpoint",
        "step": state.step,
        "total_steps": state.total_steps,
        "recipe_hash": state.recipe_hash,
        "unvalidated": state.unvalidated,
        **({} if state.waves_over is None else _about_waves(state)),
    }
    with sealed_folder(path, about) as temporary:
        save_file(snapshot.model, str(temporary / MODEL_NAME), metadata={"format": "pt"})
        save_file(snapshot.optimizer, str(temporary / OPTIMIZER_NAME))
        write_vocabulary(temporary, vocabulary)
        (temporary / STATE_NAME).write_text(json.dumps(state.as_dict(), indent=2) + "\n", encoding="utf-8")
    return path


def _about_waves(state: TrainingState) -> dict[str, Any]:
    """What the store asks a checkpoint when it releases samples: which waves, and how many are over."""
    return {"waves": state.recipe["waves"], "waves_over": state.waves_over}


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after every file in it was hashed.

    Raises:
        SealBroken: a file is missing, changed or unreadable.
        FormatTooNew: a newer eyas wrote it.
    """
    require_seal(path)
    try:
        values = json.loads((path / STATE_NAME).read_text(encoding="utf-8"))
        if values["format"] > WAVES_FORMAT:
            raise FormatTooNew(
                f"a checkpoint has format {values['format']}, this eyas knows {WAVES_FORMAT}", where=path
            )
        state = TrainingState(**values)
        DrafterShape.from_dict(state.shape)
        model, optimizer = load_file(str(path / MODEL_NAME)), load_file(str(path / OPTIMIZER_NAME))
    except FormatTooNew:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, EyasError) as error:
        raise SealBroken("a checkpoint cannot be read", where=path, why=str(error)) from error
    return Checkpoint(path, state, model, optimizer)


def newest_checkpoint(folder: Path, set_aside: SetAside) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones that are newer are handed to ``set_aside``."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_checkpoint(path)
        except SealBroken as error:
            set_aside(path, error.why or error.what)
    return None


def restore_weights(checkpoint: Checkpoint, drafter: EagleDrafter) -> None:
    """Put weights, sizes of aux states and random state back, bit for bit; the drafter is whole.

    Raises:
        SealBroken: tensors are missing or of another shape.
    """
    with _fitting(checkpoint):
        drafter.fc.set_sizes(checkpoint.optimizer["aux_sizes"].to(drafter.fc.scale.device))
        drafter.load_state_dict(checkpoint.model)
        torch.set_rng_state(checkpoint.optimizer["rng/cpu"])


def restore_optimizer(
    checkpoint: Checkpoint | None, drafter: EagleDrafter, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Put the optimizer's averages back in every process, from what the first one has read.

    Raises:
        SealBroken: tensors are missing or of another shape.
        WorkerLost: another process is gone.
    """
    with _fitting(checkpoint):
        put_optimizer({} if checkpoint is None else checkpoint.optimizer, drafter, optimizer, world)


@contextmanager
def _fitting(checkpoint: Checkpoint | None) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, KeyError) as error:
        where = None if checkpoint is None else checkpoint.path
        raise SealBroken("a checkpoint does not fit the drafter", where=where, why=str(error)) from error


def prune_checkpoints(folder: Path, keep: int, best_step: int | None) -> list[Path]:
    """Remove checkpoints that are neither among the ``keep`` newest nor the best; they are eyas's own.

    Returns:
        Those that were removed.
    """
    paths = list_checkpoints(folder)
    removed = []
    for path in paths[: max(0, len(paths) - keep)]:
        if best_step is not None and path == checkpoint_path(folder, best_step):
            continue
        _remove(path)
        removed.append(path)
    return removed


def _remove(path: Path) -> None:
    # renamed first: a crash amid removal must not leave a folder that looks damaged
    doomed = path.with_name(f".{path.name}.old.{os.getpid()}{TEMPORARY_SUFFIX}")
    os.rename(path, doomed)
    fsync_folder(path.parent)
    shutil.rmtree(doomed)
