"""The loop of a training run: steps, validations, checkpoints, and the ways out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from eyas.base.errors import DamageFound, Stopped, WorkerLost
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.drafter.checkpoint import TrainingState
from eyas.drafter.guards import Guards, Record
from eyas.drafter.keeper import CheckpointKeeper
from eyas.drafter.parallel import Parallel
from eyas.drafter.schedule import TrainingPlan
from eyas.drafter.settings import TrainSettings
from eyas.drafter.snapshot import take_snapshot
from eyas.drafter.source import SampleSource
from eyas.drafter.stepping import ReadyStep, Stepper


@dataclass
class TrainingLoop:
    """Goes from a state to the end of the plan; every process of a world runs it, in step.

    Attributes:
        state: moves on with the steps; the same in every process.
        limit: the step at which to end: that of the plan, or the end of a wave.
        keeper: writes checkpoints; used by the first process only.
        saved: the step of the newest checkpoint; -1 when there is none.
        record: writes a row of metrics; does nothing beside the first process.
    """

    state: TrainingState
    plan: TrainingPlan
    limit: int
    settings: TrainSettings
    parallel: Parallel
    stepper: Stepper
    validation: SampleSource | None
    keeper: CheckpointKeeper
    saved: int
    record: Record
    progress: Progress
    stop: StopFlag

    def __post_init__(self) -> None:
        self._world = self.parallel.world
        self._saved_at = time.monotonic()
        self._guards = Guards(self.settings, self.state, self.record, self.progress)
        held_out = self.validation is not None
        self._validation_steps = self.plan.validation_steps(self.settings.validations) if held_out else set()

    def run(self, batches: Iterator[ReadyStep]) -> None:
        """Train to the limit.

        Args:
            batches: the steps that are left, made ready.

        Raises:
            TrainingDiverged: too many steps in a row without a finite loss or gradient.
            WorkerLost: another process is gone; the last whole step is saved where all weights are here.
            Stopped: a stop was asked for in any process; the state is saved.
            OSError: a checkpoint could not be written.
        """
        try:
            self._steps(batches)
        except (WorkerLost, DamageFound):
            if self._world.first and self.parallel.whole_everywhere:
                # a step moves the weights only after its last exchange: they are those of a whole step
                self._save(alone=True)
                self._written()
            raise
        finally:
            self.keeper.close()

    def _steps(self, batches: Iterator[ReadyStep]) -> None:
        while True:
            self._validate()
            signal, due = self._world.highest([self.stop.signal_number or 0, float(self._save_is_due())])
            done = self.state.step == self.limit
            if signal or due or done:
                self._save()
            if signal or done:
                self._written()
            if signal:
                raise Stopped(int(signal))
            if done:
                return
            waited = time.monotonic()
            ready = next(batches)
            self._step(ready, time.monotonic() - waited)
            self._note_written()

    def _step(self, ready: ReadyStep, waited: float) -> None:
        """One optimizer step, or the skipping of it."""
        started, state = time.monotonic(), self.state
        num_tokens = self.plan.step_tokens(ready.planned)
        planned_tokens = self.plan.step_tokens(self.plan.steps[state.step])  # of samples set aside as well
        rate = self.settings.rate(state.step, len(self.plan.steps))
        outcome = self.stepper.take(ready, rate)
        if outcome is None:
            return
        state.step += 1
        state.tokens += num_tokens
        state.epoch, state.place = self._next_place(state.step)
        if state.waves_over is not None:
            state.waves_over = self.plan.waves_over(state.step)
        if outcome.moved:
            seconds = time.monotonic() - started
            self.record(
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
            self.progress.advance(planned_tokens, loss=outcome.loss, step=state.step)
            self._guards.good(outcome.loss, ready.planned.samples)
            for samples in outcome.unsupervised:
                self._guards.unsupervised_batch(samples)
            return
        self.progress.advance(planned_tokens, step=state.step)
        if outcome.reason:
            self._guards.not_finite(outcome.reason, outcome.culprits)
        elif ready.planned.samples:
            self._guards.no_supervision(ready.planned.samples)

    def _next_place(self, step: int) -> tuple[int, int]:
        steps = self.plan.steps
        return (steps[step].epoch, steps[step].place) if step < len(steps) else (steps[-1].epoch + 1, 0)

    def _validate(self) -> None:
        state = self.state
        if self.validation is None or not self._validation_is_due():
            return
        with self.parallel.whole():
            totals = self.parallel.passes.validate(self.validation, self.stop, self._world)
        if totals is None:
            return
        summary = totals.summary()
        state.validation = {"step": state.step, **summary}
        self.record("validation", **summary, bad_samples=totals.bad_samples)
        self.progress.say(
            f"validation at step {state.step}: loss {summary['loss'][0]:.3f}, "
            f"top-1 {summary['top1'][0]:.1%}, acceptance length {summary['walk_tau']:.3f}"
        )
        if state.best is None or summary["walk_tau"] > state.best["walk_tau"]:
            state.best = {"step": state.step, "walk_tau": summary["walk_tau"], "loss": summary["loss"]}
            self._save()

    def _validation_is_due(self) -> bool:
        state = self.state
        done = state.validation is not None and state.validation["step"] == state.step
        return state.step in self._validation_steps and not done

    def _save_is_due(self) -> bool:
        """Whether time or steps ask for a checkpoint; the first process's word counts."""
        settings, step = self.settings, self.state.step
        if not self._world.first:
            return False
        by_step = settings.checkpoint_steps > 0 and step > 0 and step % settings.checkpoint_steps == 0
        return by_step or time.monotonic() - self._saved_at >= settings.checkpoint_minutes * 60

    def _save(self, *, alone: bool = False) -> None:
        """Begin to write a checkpoint unless this step has one that lacks nothing.

        Args:
            alone: the other processes are gone; this one holds everything.
        """
        unvalidated = self._validation_is_due()
        if self.state.step == self.saved and (unvalidated or not self.state.unvalidated):
            return
        self.state.unvalidated = unvalidated
        began = time.monotonic()
        world = None if alone else self._world
        snapshot = take_snapshot(self.parallel.passes.drafter, self.stepper.optimizer, world)
        if snapshot is not None:
            self.keeper.start(snapshot, self.state, began)
        self.saved = self.state.step
        self._saved_at = time.monotonic()

    def _written(self) -> None:
        """Wait for what is being written."""
        self.keeper.wait()
        self._note_written()

    def _note_written(self) -> None:
        for done in self.keeper.finished():
            self.record(
                "checkpoint",
                step=done.step,
                name=done.path.name,
                seconds=done.seconds,
                write_seconds=done.write_seconds,
            )
