"""One optimizer step: all its batches, one update, or nothing at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.drafter.batch import PackedBatch
from eyas.drafter.gradients import GradientNorms, measure_and_clip
from eyas.drafter.model import EagleDrafter
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import PlannedStep
from eyas.drafter.settings import TrainSettings
from eyas.drafter.source import SampleSource


@dataclass(frozen=True)
class ReadyStep:
    """A planned step with its batches made.

    Attributes:
        unsupervised: samples of each batch that has no supervised row.
    """

    planned: PlannedStep
    batches: list[PackedBatch]
    unsupervised: list[tuple[str, ...]]

    @property
    def samples(self) -> list[str]:
        """All samples of the step, in order."""
        return [name for batch in self.planned.batches for name in batch]


@dataclass(frozen=True)
class StepOutcome:
    """What a step computed; weights and optimizer moved only if ``finite``.

    Attributes:
        num_rows: supervised rows of each draft step; all zero when there was nothing to learn.
        step_loss: mean row loss of each draft step; None where no row is supervised.
        reason: what was not finite; empty when all was.
        culprits: then, the samples to blame.
    """

    loss: float
    num_rows: list[int]
    step_loss: list[float | None]
    norms: GradientNorms
    reason: str = ""
    culprits: tuple[str, ...] = ()

    @property
    def finite(self) -> bool:
        return not self.reason


class Stepper:
    """Takes optimizer steps.

    Args:
        samples: where a sample that may be to blame is loaded from again.
    """

    def __init__(
        self,
        passes: BatchPasses,
        optimizer: torch.optim.Optimizer,
        samples: SampleSource,
        settings: TrainSettings,
    ) -> None:
        self._passes, self._optimizer, self._samples, self._settings = passes, optimizer, samples, settings

    def prepare(self, planned: PlannedStep) -> ReadyStep:
        """Load and pack the samples of a step; may be called from another thread."""
        made = [(ids, self._passes.prepare(self._samples, ids)) for ids in planned.batches]
        return ReadyStep(
            planned,
            [batch for _, batch in made if batch is not None],
            [ids for ids, batch in made if batch is None],
        )

    def take(self, ready: ReadyStep, rate: float) -> StepOutcome:
        """Move the weights by one step at a learning rate; not if loss or gradient is not finite."""
        settings = self._settings
        num_rows = [sum(batch.num_supervised[j] for batch in ready.batches) for j in range(settings.steps)]
        total, sums, suspects = 0.0, [0.0] * settings.steps, list[str]()
        for batch in ready.batches:
            loss, step_sums = self._passes.loss(batch, num_rows)
            loss.backward()  # type: ignore[no-untyped-call]
            share = float(loss.detach())
            total += share
            sums = [a + float(b) for a, b in zip(sums, step_sums.tolist(), strict=True)]
            if not math.isfinite(share):
                suspects += batch.ids
        norms = measure_and_clip(self._passes.drafter.named_parameters(), settings.clip)
        reason = _reason(total, norms)
        culprits: tuple[str, ...] = ()
        if reason:
            self._optimizer.zero_grad(set_to_none=True)
            culprits = self._culprits(suspects or ready.samples)
        elif ready.batches:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        means = [a / n if n else None for a, n in zip(sums, num_rows, strict=True)]
        return StepOutcome(total, num_rows, means, norms, reason, culprits)

    def _culprits(self, suspects: Sequence[str]) -> tuple[str, ...]:
        """Those that fail alone; all of them when they fail only together."""
        alone = tuple(name for name in suspects if not self._passes.is_finite(self._samples, name))
        return alone or tuple(suspects)


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
