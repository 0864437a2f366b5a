"""Training, from the first step or from the newest whole checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
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
    Checkpoint,
    SetAside,
    TrainingState,
    checkpoint_path,
    newest_checkpoint,
    prune_checkpoints,
    restore,
    save_checkpoint,
)
from eyas.drafter.guards import Guards, Record
from eyas.drafter.model import EagleDrafter
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import TrainingPlan, learning_rate
from eyas.drafter.settings import TrainSettings
from eyas.drafter.source import SampleSource, prepared_ahead
from eyas.drafter.stepping import ReadyStep, Stepper, make_optimizer
from eyas.drafter.teacher import Teacher


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
class TrainingResult:
    """What a finished run leaves: its last checkpoint, its best one, and its last validation."""

    state: TrainingState
    last: Path
    best: Path | None


class Trainer:
    """Trains a drafter.

    Args:
        recipe: what the caller knows of the weights' origin (store, vocabulary, target); joined with the
            settings, the shape, and the ids of the samples.
        start: gives the drafter its first weights; called only when there is no checkpoint.
        validation: samples to measure on, or None.

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
    ) -> None:
        self._drafter = drafter.to(settings.master_dtype())
        self._passes = BatchPasses(drafter, teacher, settings)
        self._samples, self._validation, self._settings = samples, validation, settings
        self._place, self._start, self._progress, self._stop = place, start, progress, stop
        lengths = dict(samples.lengths())
        if not lengths:
            raise DataError("there are no training samples", hint="eyas prepare")
        self._plan = TrainingPlan(
            lengths,
            epochs=settings.epochs,
            batch_tokens=settings.batch_tokens,
            accumulate=settings.accumulate,
            seed=settings.seed,
        )
        self._validation_steps = (
            self._plan.validation_steps(settings.validations) if validation is not None else set()
        )
        self._recipe = _json_form({
            **recipe,
            "train": settings.content(),
            "shape": drafter.shape.as_dict(),
            "vocabulary": hashlib.sha256(teacher.vocabulary.d2t.tobytes()).hexdigest()[:32],
            "samples": hashlib.sha256("\n".join(sorted(lengths)).encode()).hexdigest()[:32],
        })  # fmt: skip
        self._optimizer = make_optimizer(drafter, settings)
        self._stepper = Stepper(self._passes, self._optimizer, samples, settings)
        self._saved: set[int] = set()
        self._saved_at = time.monotonic()

    def run(self) -> TrainingResult:
        """Train to the end.

        Raises:
            RecipeChanged: the checkpoints there are of another recipe.
            TrainingDiverged: too many steps in a row without a finite loss or gradient.
            Stopped: a stop was asked for; the state is saved.
            OSError: a checkpoint could not be written.
        """
        state = self._resume()
        remaining = self._plan.steps[state.step :]
        tokens = [self._plan.step_tokens(step) for step in self._plan.steps]
        self._progress.start("train", total=sum(tokens), unit="tokens", done=sum(tokens[: state.step]))
        with (
            appending(self._place.metrics) as metrics,
            closing(prepared_ahead(remaining, self._stepper.prepare)) as batches,
        ):

            def record(kind: str, **facts: Any) -> None:
                row = {"kind": kind, "step": state.step, "at": utc_now_text(), **facts}
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()

            guards = Guards(self._settings, state, record, self._progress)
            while True:
                self._validate(state, record)
                if self._stop.requested:
                    self._save(state, record)
                    self._stop.check()
                if state.step == len(self._plan.steps):
                    break
                if time.monotonic() - self._saved_at >= self._settings.checkpoint_minutes * 60:
                    self._save(state, record)
                waited = time.monotonic()
                ready = next(batches)
                self._step(state, ready, guards, record, time.monotonic() - waited)
            self._save(state, record)
        return TrainingResult(
            state,
            checkpoint_path(self._place.checkpoints, state.step),
            checkpoint_path(self._place.checkpoints, state.best["step"]) if state.best else None,
        )

    def _resume(self) -> TrainingState:
        found = newest_checkpoint(self._place.checkpoints, self._set_aside)
        if found is None:
            torch.manual_seed(self._settings.seed)
            self._start()
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
                schedule=self._schedule(),
            )
        self._refuse_other_recipe(found)
        restore(found, self._drafter, self._optimizer)
        self._saved.add(found.state.step)
        self._progress.say(f"resuming at step {found.state.step} of {found.state.total_steps}")
        return replace(found.state)

    def _set_aside(self, path: Path, reason: str) -> None:
        self._progress.say(f"checkpoint {path.name} is damaged ({reason}) and set aside")
        self._place.set_aside(path, reason)

    def _refuse_other_recipe(self, found: Checkpoint) -> None:
        if found.state.recipe_hash != recipe_hash(self._recipe):
            raise RecipeChanged(
                "the checkpoints there were trained by another recipe",
                where=found.path,
                why="; ".join(recipe_differences(found.state.recipe, self._recipe)) or "unknown field",
            )

    def _schedule(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "kind": settings.schedule,
            "peak": settings.lr,
            "warmup": settings.warmup,
            "min_ratio": settings.min_lr_ratio,
            "total_steps": len(self._plan.steps),
        }

    def _step(
        self,
        state: TrainingState,
        ready: ReadyStep,
        guards: Guards,
        record: Record,
        waited: float,
    ) -> None:
        """One optimizer step, or the skipping of it."""
        started = time.monotonic()
        settings = self._settings
        num_tokens = self._plan.step_tokens(ready.planned)
        rate = learning_rate(
            state.step,
            len(self._plan.steps),
            peak=settings.lr,
            warmup=settings.warmup,
            min_ratio=settings.min_lr_ratio,
            schedule=settings.schedule,
            decay=settings.decay,
        )
        outcome = self._stepper.take(ready, rate)
        state.step += 1
        state.tokens += num_tokens
        state.epoch, state.place = self._next_place(state.step)
        if outcome.finite and any(outcome.num_rows):
            seconds = time.monotonic() - started
            record(
                "train",
                epoch=ready.planned.epoch,
                loss=outcome.loss,
                step_loss=outcome.step_loss,
                grad_norm=outcome.norms.total,
                grad_norms=outcome.norms.by_module,
                lr=rate,
                tokens=state.tokens,
                supervised_rows=outcome.num_rows,
                tokens_per_second=num_tokens / max(seconds + waited, 1e-9),
                data_wait_seconds=waited,
            )
            self._progress.advance(num_tokens, loss=outcome.loss, step=state.step)
            guards.good(outcome.loss, ready.samples)
            for samples in ready.unsupervised:
                guards.unsupervised_batch(samples)
            return
        self._progress.advance(num_tokens, step=state.step)
        if outcome.finite:
            guards.no_supervision(ready.samples)
        else:
            guards.not_finite(outcome.reason, outcome.culprits)

    def _next_place(self, step: int) -> tuple[int, int]:
        if step < len(self._plan.steps):
            return self._plan.steps[step].epoch, self._plan.steps[step].place
        return self._plan.steps[-1].epoch + 1, 0

    def _validate(self, state: TrainingState, record: Record) -> None:
        due = state.step in self._validation_steps
        done = state.validation is not None and state.validation["step"] == state.step
        if not due or done or self._validation is None:
            return
        totals = self._passes.validate(self._validation, self._stop)
        if totals is None:
            return
        summary = totals.summary()
        state.validation = {"step": state.step, **summary}
        record("validation", **summary, bad_samples=totals.bad_samples)
        self._progress.say(
            f"validation at step {state.step}: loss {summary['loss'][0]:.3f}, "
            f"top-1 {summary['top1'][0]:.1%}, acceptance length {summary['walk_tau']:.3f}"
        )
        if state.best is None or summary["walk_tau"] > state.best["walk_tau"]:
            state.best = {"step": state.step, "walk_tau": summary["walk_tau"], "loss": summary["loss"]}
            self._save(state, record)

    def _save(self, state: TrainingState, record: Record) -> None:
        """Write a checkpoint unless this step has one, then remove those that are no longer kept."""
        if state.step in self._saved:
            return
        started = time.monotonic()
        path = save_checkpoint(self._place.checkpoints, self._drafter, self._optimizer, state)
        self._saved.add(state.step)
        prune_checkpoints(
            self._place.checkpoints,
            self._settings.keep_checkpoints,
            state.best["step"] if state.best else None,
        )
        self._saved_at = time.monotonic()
        record("checkpoint", name=path.name, seconds=self._saved_at - started)


def _json_form(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe as it will be read back, so that tuples and lists compare equal."""
    form: dict[str, Any] = json.loads(json.dumps(recipe))
    return form
