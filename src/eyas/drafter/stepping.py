"""One optimizer step: all its batches, one update, or nothing at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.base.stop import StopFlag
from eyas.drafter.batch import PackedBatch
from eyas.drafter.gradients import GradientNorms, measure_and_clip
from eyas.drafter.model import EagleDrafter
from eyas.drafter.parallel import Parallel
from eyas.drafter.schedule import PlannedStep, dealt_out
from eyas.drafter.settings import TrainSettings
from eyas.drafter.source import SampleSource


@dataclass(frozen=True)
class ReadyStep:
    """A planned step with this process's batches made.

    Attributes:
        samples: those this process takes.
        unsupervised: samples of each batch that has no supervised row.
    """

    planned: PlannedStep
    samples: list[str]
    batches: list[PackedBatch]
    unsupervised: list[tuple[str, ...]]


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to, over all processes; weights and optimizer moved only if ``moved``.

    Attributes:
        num_rows: supervised rows of each draft step; all zero when there was nothing to learn.
        step_loss: mean row loss of each draft step; None where no row is supervised.
        unsupervised: samples of each batch that has no supervised row.
        reason: what was not finite; empty when all was.
        culprits: then, the samples to blame.
    """

    loss: float
    num_rows: list[int]
    step_loss: list[float | None]
    norms: GradientNorms
    unsupervised: list[list[str]]
    reason: str = ""
    culprits: tuple[str, ...] = ()

    @property
    def moved(self) -> bool:
        return not self.reason and any(self.num_rows)


class Stepper:
    """Takes optimizer steps; all processes of a world call it in step.

    Args:
        samples: where samples are loaded from.
        lengths, costs: their tokens and relative work; the same in every process.
        stop: looked at between the batches of a process alone.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        samples: SampleSource,
        lengths: Mapping[str, int],
        costs: Mapping[str, float],
        settings: TrainSettings,
        stop: StopFlag,
    ) -> None:
        self._parallel, self._passes, self._world = parallel, parallel.passes, parallel.world
        self.optimizer, self._samples, self._lengths = optimizer, samples, lengths
        self._costs, self._settings, self._stop = costs, settings, stop

    def prepare(self, planned: PlannedStep) -> ReadyStep:
        """Load and pack this process's samples of a step; may be called from another thread."""
        world = self._world
        budget = self._settings.batch_tokens
        mine = dealt_out(planned, self._lengths, self._costs, budget, world.size)[world.rank]
        made = [(ids, self._passes.prepare(self._samples, ids)) for ids in mine]
        return ReadyStep(
            planned,
            [name for ids in mine for name in ids],
            [batch for _, batch in made if batch is not None],
            [ids for ids, batch in made if batch is None],
        )

    def take(self, ready: ReadyStep, rate: float) -> StepOutcome | None:
        """Move the weights by one step at a learning rate; not if loss or gradient is not finite.

        Returns:
            None when a stop was asked for meanwhile; nothing has changed then.

        Raises:
            WorkerLost: another process is gone; nothing has changed.
        """
        settings, world = self._settings, self._world
        rows = [sum(batch.num_supervised[j] for batch in ready.batches) for j in range(settings.steps)]
        *totals, num_unsupervised = world.total([*rows, len(ready.unsupervised)])
        num_rows = [int(count) for count in totals]
        unsupervised: list[list[str]] = []
        if num_unsupervised:
            parts = world.from_all([list(ids) for ids in ready.unsupervised])
            unsupervised = [ids for part in parts for ids in part]
        if not any(num_rows):
            nothing: list[float | None] = [None] * settings.steps
            return StepOutcome(0.0, num_rows, nothing, GradientNorms(0.0, {}), unsupervised)
        try:
            mine = self._parallel.add_gradients(ready.batches, num_rows, self._stop)
            if mine is None:
                return None
            loss, *sums = world.total([mine.loss, *mine.rows])
            norms = measure_and_clip(self._passes.drafter.named_parameters(), settings.clip)
            reason = _reason(loss, norms)
            if not reason:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        means = [a / n if n else None for a, n in zip(sums, num_rows, strict=True)]
        culprits = self._culprits(mine.suspects, ready) if reason else ()
        return StepOutcome(loss, num_rows, means, norms, unsupervised, reason, culprits)

    def _culprits(self, suspects: Sequence[str], ready: ReadyStep) -> tuple[str, ...]:
        """Those that fail alone; all suspects when they fail only together."""
        suspected = [name for names in self._world.from_all(list(suspects)) for name in names]
        looked_at = suspects if suspected else ready.samples
        with self._parallel.whole():
            alone = [name for name in looked_at if not self._passes.is_finite(self._samples, name)]
        found = [name for names in self._world.from_all(alone) for name in names]
        return tuple(found or suspected or ready.planned.samples)


def make_optimizer(drafter: EagleDrafter, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019); only matrices decay."""
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    vectors = [p for p in drafter.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        fused=True,
    )


def _reason(loss: float, norms: GradientNorms) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norms.total):
        where = [module for module, norm in norms.by_module.items() if not math.isfinite(norm)]
        return f"the gradient of {', '.join(where) or 'all together'} is not finite"
    return ""
