"""Training the drafter from the store."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from eyas.base.errors import NotReady, SealBroken
from eyas.base.layout import Layout
from eyas.base.seal import is_sealed, require_seal
from eyas.base.units import counted
from eyas.drafter.kernels.compiled import why_not
from eyas.drafter.model import EagleDrafter
from eyas.drafter.settings import TrainSettings
from eyas.drafter.shape import DrafterShape
from eyas.drafter.trackers.follower import following
from eyas.drafter.trackers.interface import TrackedRun
from eyas.drafter.vocabulary import (
    DraftVocabulary,
    build_vocabulary,
    load_vocabulary,
    save_vocabulary,
)
from eyas.drafter.warmstart import give_first_weights, start_from_weights
from eyas.drafter.world import World
from eyas.stages.chat_tools import end_tokens, load_tokenizer
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.records import checkpoint_folders, recorded_train_dtype
from eyas.stages.stored_states import StoredSamples
from eyas.stages.threads import set_threads
from eyas.stages.train.begin import StartingDrafter, read_start
from eyas.stages.train.launch import outer, started
from eyas.stages.train.outer import OuterPlace
from eyas.stages.train.stage import train_recipe
from eyas.stages.train.together import (
    device_of,
    make_brief,
    num_processes,
    train_settings,
    train_together,
)
from eyas.stages.waves import not_captured, wave_rule
from eyas.store.ledger import Ledger
from eyas.store.samples import read_samples
from eyas.store.wave_record import waves_over
from eyas.store.waves import WaveRule, plan_waves
from eyas.targets.dtype import resolve_dtype
from eyas.targets.parts import TargetParts, load_parts


def run(project: Project, context: RunContext) -> dict[str, object]:
    """Train to the end, from the start or from the newest whole checkpoint, in one process or several.

    When the store has a bound: to the end of the wave that is there.

    Raises:
        NotReady: samples are to be captured first.
        RecipeChanged: the checkpoints there are of another recipe.
        TrainingDiverged: the loss is not finite, again and again.
        WorkerLost: another training process is gone.
        Stopped: a signal came; a checkpoint is saved.
    """
    layout, ledger = project.layout, context.ledger
    size, place = num_processes(project), OuterPlace.here()
    set_threads(project, size if place is None else place.local_size)
    require_seal(layout.samples)
    rule = wave_rule(project)
    left, wave = _not_captured(ledger, layout, rule)
    if left or not ledger.counts()["stored"].samples:
        raise NotReady(
            f"{counted(left, 'sample')} to be captured first"
            + (f" for wave {wave + 1}" if rule is not None else ""),
            where=layout.store,
            hint="eyas extract, or eyas run",
        )
    device = device_of(project, 0 if place is None else place.local_rank, size)
    wanted = project.config.train.dtype
    recorded = recorded_train_dtype(project) if wanted == "auto" else None
    dtype = recorded or resolve_dtype(wanted, device)[0]
    settings = train_settings(project, dtype)
    if device == "cpu" and dtype != "float64" and (reason := why_not()):
        context.progress.say(f"training goes without its compiled passes and takes longer: {reason}")
    parts = load_parts(project.resolved.model, device, settings.master_dtype())
    begun = read_start(project, parts)
    vocabulary = _vocabulary(project, context, begun)
    shape = begun.shape if begun is not None else _shape(project, vocabulary)
    brief = make_brief(ledger, dtype, shape, train_recipe(project, dtype), rule, wave)

    def start(drafter: EagleDrafter, samples: StoredSamples) -> None:
        _start(drafter, settings, vocabulary, parts, samples, begun, context)

    followed = following(
        layout.metrics, _tracked_run(project), project.config.train.trackers, context.progress.say
    )
    with _world(project, context, place, size, device) as world, followed:
        result = train_together(
            project,
            world,
            device,
            world.from_first(brief),
            context.progress,
            context.stop,
            start=start,
            parts=parts,
        )
    numbers: dict[str, object] = {
        "steps": result.state.step,
        "tokens": result.state.tokens,
        "draft_vocabulary": vocabulary.size,
        "parameters": result.num_parameters,
    }
    if size > 1:
        numbers["processes"] = size
    if result.state.validation is not None:
        numbers["validation_acceptance_length"] = result.state.validation["walk_tau"]
        numbers["validation_loss"] = result.state.validation["loss"][0]
    return numbers


def _not_captured(ledger: Ledger, layout: Layout, rule: WaveRule | None) -> tuple[int, int]:
    """Samples that training needs now and that are neither stored nor given up, and the wave it is at."""
    if rule is None:
        counts = ledger.counts()
        return counts["pending"].samples + counts["in_flight"].samples + counts["failed"].samples, 0
    plan = plan_waves(ledger.entries(), rule)
    wave = waves_over(layout, plan.digest)
    return not_captured(ledger, (*plan.kept, *(plan.waves[wave].ids if wave < len(plan) else ()))), wave


def _world(
    project: Project, context: RunContext, place: OuterPlace | None, size: int, device: str
) -> AbstractContextManager[World]:
    if size == 1:
        return nullcontext(World())
    train = project.config.train
    each = train.batch_tokens * train.accumulate // size
    fuller = f"; train.accumulate = {size} would fill them" if train.accumulate < size else ""
    context.progress.say(f"{size} processes share each step, about {each} tokens for one of them{fuller}")
    if place is not None:
        return outer(place, device)
    logs = project.layout.logs / f"attempt-{context.attempt:04d}"
    threads = torch.get_num_threads()
    return started(project, size, device, threads, logs, context.progress, context.stop)


def _tracked_run(project: Project) -> TrackedRun:
    settings = project.config.train.model_dump(mode="json", exclude={"trackers"})
    flat = {f"train.{key}": value for key, value in settings.items()}
    target = {"target": project.config.target.model}
    return TrackedRun(project.layout.root.name, project.layout.drafter / "trackers", {**target, **flat})


def _start(
    drafter: EagleDrafter,
    settings: TrainSettings,
    vocabulary: DraftVocabulary,
    parts: TargetParts,
    samples: StoredSamples,
    begun: StartingDrafter | None,
    context: RunContext,
) -> None:
    if begun is not None:
        for note in begun.notes:
            context.progress.say(note)
        start_from_weights(drafter, begun.weights, parts.norm_weight, samples, settings.seed)
        context.progress.say(f"training goes on from {begun.folder}")
        return
    num_rows = give_first_weights(
        drafter, settings, vocabulary, head=parts.head, norm_weight=parts.norm_weight, samples=samples
    )
    if num_rows:
        context.progress.say(f"fc starts from a ridge fit over {counted(num_rows, 'row')}")


def _vocabulary(project: Project, context: RunContext, begun: StartingDrafter | None) -> DraftVocabulary:
    """The mapping on disk or of a checkpoint, that of the drafter one starts from, or a new one."""
    folder, resolved = project.layout.vocabulary, project.resolved
    if is_sealed(folder):
        return load_vocabulary(folder)
    counts = np.zeros(resolved.facts.vocab_size, dtype=np.int64)
    for sample in read_samples(project.layout.samples):
        if sample.split == "train":
            for start, end in sample.spans:
                np.add.at(counts, sample.tokens[start:end], 1)
    for checkpoint in reversed(checkpoint_folders(project.layout.checkpoints)):
        # damaged ones are the trainer's to set aside
        with suppress(SealBroken):
            vocabulary = load_vocabulary(checkpoint)
            context.progress.say(f"the draft vocabulary is lost; {checkpoint.name} carries it")
            return _keep_vocabulary(vocabulary, folder, counts, context)
    if begun is not None:
        return _keep_vocabulary(begun.vocabulary, folder, counts, context)
    tokenizer = load_tokenizer(project)
    special = {*end_tokens(project, tokenizer), *getattr(tokenizer, "all_special_ids", ())}
    inside = [token for token in sorted(special) if 0 <= token < resolved.facts.vocab_size]
    vocabulary = build_vocabulary(counts, project.config.drafter.vocab_size, inside)
    return _keep_vocabulary(vocabulary, folder, counts, context)


def _keep_vocabulary(
    vocabulary: DraftVocabulary, folder: Path, counts: npt.NDArray[np.int64], context: RunContext
) -> DraftVocabulary:
    covered = vocabulary.coverage(counts)
    save_vocabulary(folder, vocabulary, {"coverage": covered, "size": vocabulary.size})
    context.progress.say(
        f"draft vocabulary of {vocabulary.size} tokens, {100 * covered:.2f}% of the supervised ones"
    )
    return vocabulary


def _shape(project: Project, vocabulary: DraftVocabulary) -> DrafterShape:
    resolved, facts = project.resolved, project.resolved.facts
    return DrafterShape(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        num_aux=len(resolved.aux_layers),
        intermediate_size=resolved.intermediate_size,
        num_heads=resolved.num_heads,
        num_kv_heads=resolved.num_kv_heads,
        head_dim=resolved.head_dim,
        draft_vocab_size=vocabulary.size,
        target_vocab_size=facts.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        rope_scaling=facts.rope_scaling,
        max_position_embeddings=facts.max_position_embeddings,
        norms=project.config.drafter.norms,
    )
