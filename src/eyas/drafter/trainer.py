"""Training, from the first step or from the newest whole checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.base.clock import utc_now_text
from eyas.base.errors import DataError, RecipeChanged
from eyas.base.files import appending
from eyas.base.hashing import recipe_differences, recipe_hash
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.drafter.checkpoint import (
    FORMAT,
    WAVES_FORMAT,
    Checkpoint,
    SetAside,
    TrainingState,
    checkpoint_path,
    newest_checkpoint,
    restore_optimizer,
    restore_weights,
)
from eyas.drafter.guards import Record
from eyas.drafter.keeper import CheckpointKeeper
from eyas.drafter.loop import TrainingLoop
from eyas.drafter.model import EagleDrafter
from eyas.drafter.parallel import Parallel, Sharding
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import TrainedWave, TrainingPlan
from eyas.drafter.settings import TrainSettings
from eyas.drafter.snapshot import spread_weights
from eyas.drafter.source import SampleSource, prepared_ahead, sample_costs
from eyas.drafter.stepping import Stepper, make_optimizer
from eyas.drafter.teacher import Teacher
from eyas.drafter.world import World


@dataclass(frozen=True)
class TrainingPlace:
    """Where a run keeps what it writes.

    Attributes:
        checkpoints: folder of sealed checkpoints.
        metrics: JSON lines, appended. After a resume the steps since the checkpoint come again: of two
            rows of one kind and step the later counts.
        set_aside: moves a damaged checkpoint out of the folder.
    """

    checkpoints: Path
    metrics: Path
    set_aside: SetAside


@dataclass(frozen=True)
class WaveTurn:
    """Training on one wave of samples, of several that are there one after the other.

    Attributes:
        waves: all of them.
        number: of the wave that is there now; their count when all are over.
        lengths: tokens of every sample of any wave.
        digest: identity of ``waves``.
    """

    waves: Sequence[TrainedWave]
    number: int
    lengths: Mapping[str, int]
    digest: str


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run leaves: its last state and checkpoint, its best one, and how much it trained."""

    state: TrainingState
    last: Path
    best: Path | None
    num_parameters: int


class Trainer:
    """Trains a drafter.

    Args:
        recipe: what the caller knows of the weights' origin (store, vocabulary, target); joined with the
            settings, the shape, and the ids of the samples.
        start: gives the drafter its first weights; called only when there is no checkpoint, and only in
            the first process.
        validation: samples to measure on, or None.
        world: the processes that train together, each with a trainer of the same samples and settings;
            only the first reads and writes ``place``. None: this process alone.
        sharding: how they divide the drafter.
        turn: train only the wave that is there; ``samples`` are those of it that could be captured.

    Raises:
        DataError: there is nothing to train on.
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        teacher: Teacher,
        samples: SampleSource,
        validation: SampleSource | None,
        settings: TrainSettings,
        place: TrainingPlace,
        *,
        recipe: Mapping[str, Any],
        start: Callable[[], None],
        progress: Progress,
        stop: StopFlag,
        world: World | None = None,
        sharding: Sharding = "ddp",
        turn: WaveTurn | None = None,
    ) -> None:
        self._drafter = drafter.to(settings.master_dtype())
        self._passes = BatchPasses(drafter, teacher, settings)
        self._samples, self._validation, self._settings = samples, validation, settings
        self._place, self._start, self._progress, self._stop = place, start, progress, stop
        self._world, self._sharding, self._turn = world or World(), sharding, turn
        self._lengths = dict(samples.lengths() if turn is None else turn.lengths)
        if not self._lengths:
            raise DataError("there are no training samples", hint="eyas prepare")
        self._plan = TrainingPlan(
            self._lengths,
            epochs=settings.epochs,
            batch_tokens=settings.batch_tokens,
            accumulate=settings.accumulate,
            seed=settings.seed,
            waves=None if turn is None else turn.waves,
        )
        self._num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
        self._recipe = _json_form({
            **recipe,
            "train": settings.content(),
            "shape": drafter.shape.as_dict(),
            "vocabulary": hashlib.sha256(teacher.vocabulary.d2t.tobytes()).hexdigest()[:32],
            "samples": hashlib.sha256("\n".join(sorted(self._lengths)).encode()).hexdigest()[:32],
            **({} if turn is None else {"waves": turn.digest}),
        })  # fmt: skip

    def run(self) -> TrainingResult:
        """Train to the end, or to the end of the wave that is there.

        Raises:
            RecipeChanged: the checkpoints there are of another recipe.
            TrainingDiverged: too many steps in a row without a finite loss or gradient.
            WorkerLost: another of the processes is gone.
            Stopped: a stop was asked for; the state is saved.
            OSError: a checkpoint could not be written.
        """
        settings, world = self._settings, self._world
        found = self._resume() if world.first else None
        state = self._agreed_state(found)
        parallel = Parallel(self._passes, world, self._sharding)
        optimizer = make_optimizer(self._drafter, settings)
        restore_optimizer(found, self._drafter, optimizer, world)
        costs = sample_costs(self._samples, settings.steps)
        stepper = Stepper(parallel, optimizer, self._samples, self._lengths, costs, settings, self._stop)
        limit = self._limit(state.step)
        there = self._samples.lengths()
        remaining = self._plan.steps[state.step : limit]
        if self._turn is not None:
            remaining = [step.only(there) for step in remaining]
        tokens = [self._plan.step_tokens(step) for step in self._plan.steps]
        self._progress.start("train", total=sum(tokens), unit="tokens", done=sum(tokens[: state.step]))
        with (
            self._recording(state) as record,
            closing(prepared_ahead(remaining, stepper.prepare)) as batches,
        ):
            TrainingLoop(
                state=state,
                plan=self._plan,
                limit=limit,
                settings=settings,
                parallel=parallel,
                stepper=stepper,
                validation=self._validation,
                keeper=CheckpointKeeper(
                    self._place.checkpoints, settings.keep_checkpoints, self._passes.teacher.vocabulary
                ),
                saved=-1 if state.step == 0 and not world.from_first(found is not None) else state.step,
                record=record,
                progress=self._progress,
                stop=self._stop,
            ).run(batches)
        return TrainingResult(
            state,
            checkpoint_path(self._place.checkpoints, state.step),
            checkpoint_path(self._place.checkpoints, state.best["step"]) if state.best else None,
            self._num_parameters,
        )

    def _limit(self, step: int) -> int:
        """The step at which this run ends."""
        turn = self._turn
        if turn is None or turn.number == len(turn.waves):
            return len(self._plan.steps)
        if self._plan.waves_over(step) != turn.number:
            return step  # back at an older checkpoint, whose wave is not there
        return self._plan.wave_ends[turn.number]

    def _resume(self) -> Checkpoint | None:
        """Weights of the newest whole checkpoint, or first ones; the checkpoint that was read."""
        found = newest_checkpoint(self._place.checkpoints, self._set_aside)
        if found is None:
            torch.manual_seed(self._settings.seed)
            self._start()
            return None
        if found.state.recipe_hash != recipe_hash(self._recipe):
            raise RecipeChanged(
                "the checkpoints there were trained by another recipe",
                where=found.path,
                why="; ".join(recipe_differences(found.state.recipe, self._recipe)) or "unknown field",
            )
        restore_weights(found, self._drafter)
        self._progress.say(f"resuming at step {found.state.step} of {found.state.total_steps}")
        return found

    def _agreed_state(self, found: Checkpoint | None) -> TrainingState:
        """The state of a checkpoint or of a run's beginning, with its weights in every process."""
        table = self._world.from_first(asdict(found.state if found is not None else self._beginning()))
        spread_weights(self._drafter, self._world)
        return TrainingState(**table)

    def _beginning(self) -> TrainingState:
        return TrainingState(
            step=0,
            total_steps=len(self._plan.steps),
            epoch=0,
            place=0,
            tokens=0,
            bad_steps=0,
            shape=self._drafter.shape.as_dict(),
            recipe=self._recipe,
            recipe_hash=recipe_hash(self._recipe),
            schedule={
                "kind": self._settings.schedule,
                "peak": self._settings.lr,
                "warmup": self._settings.warmup,
                "min_ratio": self._settings.min_lr_ratio,
                "total_steps": len(self._plan.steps),
            },
            format=FORMAT if self._turn is None else WAVES_FORMAT,
            waves_over=None if self._turn is None else 0,
        )

    def _set_aside(self, path: Path, reason: str) -> None:
        self._progress.say(f"checkpoint {path.name} is damaged ({reason}) and set aside")
        self._place.set_aside(path, reason)

    @contextmanager
    def _recording(self, state: TrainingState) -> Iterator[Record]:
        """Metrics as JSON lines, in the first process; in the others nothing."""
        if not self._world.first:
            yield lambda kind, **facts: None
            return
        with appending(self._place.metrics) as metrics:

            def record(kind: str, **facts: Any) -> None:
                row = {"kind": kind, "step": state.step, "at": utc_now_text(), **facts}
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()

            yield record


def _json_form(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe as it will be read back, so that tuples and lists compare equal."""
    form: dict[str, Any] = json.loads(json.dumps(recipe))
    return form
