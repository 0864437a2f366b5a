"""What every training process does alike: the same drafter, samples and settings, each on its own device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.base.errors import ConfigError
from eyas.base.files import set_aside
from eyas.base.layout import Layout
from eyas.base.memory import keep_freed_memory
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.drafter.model import EagleDrafter
from eyas.drafter.schedule import TrainedWave
from eyas.drafter.settings import TrainSettings
from eyas.drafter.shape import DrafterShape
from eyas.drafter.teacher import Teacher
from eyas.drafter.trainer import Trainer, TrainingPlace, TrainingResult, WaveTurn
from eyas.drafter.vocabulary import load_vocabulary
from eyas.drafter.world import World
from eyas.stages.project import Project
from eyas.stages.stored_states import StoredSamples
from eyas.stages.train.outer import OuterPlace
from eyas.store.entry import SampleEntry
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.waves import WaveRule, plan_waves
from eyas.targets.dtype import resolve_device
from eyas.targets.parts import TargetParts, load_parts

_NOT_OF_TRAINER = {"start_from", "processes", "sharding", "trackers"}

Brief = Mapping[str, Any]
"""What the first process tells the others: ``dtype``, ``shape``, ``recipe``, ``samples``, ``segments``; with
waves their ``rule`` and the ``wave`` that is there."""


def num_processes(project: Project) -> int:
    """How many processes train: those of an outer launcher, as configured, or one for each GPU.

    Raises:
        ConfigError: more than there are GPUs for.
    """
    place = OuterPlace.here()
    if place is not None:
        return place.size
    wanted = project.config.train.processes
    device, _ = resolve_device(project.config.target.device)
    if not device.startswith("cuda"):
        return wanted or 1
    there = torch.cuda.device_count() if device == "cuda" else 1
    if wanted > there:
        raise ConfigError(
            f"train.processes = {wanted} needs {wanted} GPUs",
            why=f"{there} of them may be used (target.device is {project.config.target.device!r})",
            hint=f"set train.processes = {there}, or 0 for as many as there are",
        )
    return wanted or there


def device_of(project: Project, local_rank: int, size: int) -> str:
    """The device of one of ``size`` processes, by its number on its machine."""
    device, _ = resolve_device(project.config.target.device)
    return f"cuda:{local_rank}" if device == "cuda" and size > 1 else device


def train_settings(project: Project, dtype: str) -> TrainSettings:
    """The trainer's settings, with the arithmetic that ``auto`` stands for."""
    return TrainSettings(**{**project.config.train.model_dump(exclude=_NOT_OF_TRAINER), "dtype": dtype})


def make_brief(
    ledger: Ledger,
    dtype: str,
    shape: DrafterShape,
    recipe: Mapping[str, object],
    rule: WaveRule | None = None,
    wave: int = 0,
) -> Brief:
    """The first process's word: with it, the others need neither the ledger nor the samples' file.

    Args:
        rule, wave: of a store with a bound: then all samples are told of, stored or not.
    """
    stored = dict(ledger.stored())
    samples: dict[str, list[tuple[str, int, int]]] = {"train": [], "validation": []}
    for entry in ledger.entries():
        if (rule is not None or entry.id in stored) and entry.split in samples:
            samples[entry.split].append((entry.id, entry.length, entry.num_supervised))
    return {
        "dtype": dtype,
        "shape": shape.as_dict(),
        "recipe": recipe,
        "samples": samples,
        "segments": stored,
        **({} if rule is None else {"rule": rule.as_dict(), "wave": wave}),
    }


def train_together(
    project: Project,
    world: World,
    device: str,
    brief: Brief,
    progress: Progress,
    stop: StopFlag,
    *,
    start: Callable[[EagleDrafter, StoredSamples], None],
    parts: TargetParts | None = None,
) -> TrainingResult:
    """Train to the end as one of the processes of a world.

    Args:
        brief: the same in all.
        start: gives the drafter its first weights; called in the first process only.
        parts: of the target, if they are loaded already.

    Raises:
        What `eyas.drafter.trainer.Trainer.run` raises.
    """
    keep_freed_memory()
    layout = project.layout
    settings = train_settings(project, brief["dtype"])
    parts = parts or load_parts(project.resolved.model, device, settings.master_dtype())
    vocabulary = load_vocabulary(layout.vocabulary)
    shape = DrafterShape.from_dict(brief["shape"])
    drafter = EagleDrafter(shape, parts.embedding.to(settings.compute_dtype())).to(device)
    reader = StoreReader(layout.segments, brief["segments"])
    entries = {
        split: [SampleEntry(name, tokens, rows, split, "") for name, tokens, rows in brief["samples"][split]]
        for split in ("train", "validation")
    }
    turn = _turn(brief, entries)
    trained = entries["train"]
    if turn is not None:
        here = set(turn.waves[turn.number].ids) if turn.number < len(turn.waves) else set()
        trained = [entry for entry in trained if entry.id in here]
    samples, held_out = StoredSamples(reader, trained), StoredSamples(reader, entries["validation"])
    trainer = Trainer(
        drafter,
        Teacher(parts.head, vocabulary, device=torch.device(device), dtype=settings.compute_dtype()),
        samples,
        held_out if held_out.lengths() else None,
        settings,
        TrainingPlace(
            layout.checkpoints,
            layout.metrics,
            lambda path, reason: _set_aside(layout, path, reason),
        ),
        recipe={"inputs": brief["recipe"]},
        start=lambda: start(drafter, samples),
        progress=progress,
        stop=stop,
        world=world,
        sharding=project.config.train.sharding,
        turn=turn,
    )
    try:
        return trainer.run()
    finally:
        reader.close()  # a file that is mapped keeps its room on the disk after it was released


def _turn(brief: Brief, entries: Mapping[str, Sequence[SampleEntry]]) -> WaveTurn | None:
    """The wave that is trained now; every process finds the same ones."""
    if "rule" not in brief:
        return None
    plan = plan_waves([*entries["train"], *entries["validation"]], WaveRule(**brief["rule"]))
    waves = [TrainedWave(wave.ids, wave.passes) for wave in plan.waves]
    return WaveTurn(waves, brief["wave"], {e.id: e.length for e in entries["train"]}, plan.digest)


def _set_aside(layout: Layout, path: Path, reason: str) -> None:
    set_aside(path, layout.set_aside, reason)
