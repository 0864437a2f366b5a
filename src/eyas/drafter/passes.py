"""One batch through the drafter: with gradients for training, without for validation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.base.stop import StopFlag
from eyas.drafter.batch import PackedBatch, pack
from eyas.drafter.loss import LossTask, draft_loss, needs_normaliser, row_facts
from eyas.drafter.metrics import ValidationTotals
from eyas.drafter.model import EagleDrafter
from eyas.drafter.schedule import pack_by_tokens
from eyas.drafter.settings import TrainSettings
from eyas.drafter.source import SampleSource, prepared_ahead
from eyas.drafter.teacher import Teacher
from eyas.drafter.world import World

CACHED_ROWS = 1 << 26
"""Rows whose normaliser and top token are remembered from epoch to epoch (12 bytes each)."""


class BatchPasses:
    """Runs batches through a drafter against its teacher.

    Args:
        teacher: on the drafter's device, in the arithmetic of ``settings``.
    """

    def __init__(self, drafter: EagleDrafter, teacher: Teacher, settings: TrainSettings) -> None:
        self.drafter, self.teacher, self.settings = drafter, teacher, settings
        self.device = drafter.fc.weight.device
        self.dtype = settings.compute_dtype()
        self._facts: dict[str, tuple[Tensor, npt.NDArray[np.int64]]] = {}
        self._cached_rows = 0

    def prepare(self, source: SampleSource, ids: Sequence[str]) -> PackedBatch | None:
        """Load and pack samples; None when none of their rows is supervised."""
        samples = source.load(ids)
        return pack(samples, device=self.device, dtype=self.dtype, steps=self.settings.steps)

    def loss(self, batch: PackedBatch, num_rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch's share of the loss, with its graph, and the sum of row losses of each step without.

        Args:
            num_rows: rows supervised at each step in the whole optimizer step, of which this batch may
                be a part.
        """
        weights = self.settings.step_weights()
        shares = [weight / max(1, count) for weight, count in zip(weights, num_rows, strict=True)]
        return draft_loss(self._states(batch), self.drafter.lm_head.weight, self._task(batch, shares))

    def train(self, batch: PackedBatch, num_rows: Sequence[int]) -> tuple[float, list[float]]:
        """Add the batch's gradients in a process alone; its share of the loss and the sum of row losses of
        each step.

        Args:
            num_rows: as for `loss`.
        """
        loss, sums = self.loss(batch, num_rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), [float(x) for x in sums.tolist()]

    def is_finite(self, source: SampleSource, sample_id: str) -> bool:
        """Whether one sample alone has a finite loss and finite gradients; leaves no gradient behind."""
        batch = self.prepare(source, [sample_id])
        if batch is None:
            return True
        loss, _ = self.loss(batch, batch.num_supervised)
        gradients = torch.autograd.grad(loss, list(self.drafter.parameters()))
        return all(bool(torch.isfinite(part).all()) for part in (loss, *gradients))

    @torch.no_grad()
    def validate(
        self, source: SampleSource, stop: StopFlag, world: World | None = None
    ) -> ValidationTotals | None:
        """Totals over all samples of a source, or None when a stop was asked for meanwhile.

        Args:
            world: the processes that share the batches; each has whole weights.
        """
        world = world or World()
        totals = ValidationTotals(self.settings.steps)
        lengths = dict(source.lengths())
        batches = pack_by_tokens(sorted(lengths), lengths, self.settings.batch_tokens)
        mine = batches[world.rank :: world.size]
        for batch in prepared_ahead(mine, lambda ids: self.prepare(source, ids)):
            if stop.requested:
                break
            if batch is None:
                continue
            normaliser, top_tokens = self._full_facts(batch)
            task = self._task(batch, [1.0] * self.settings.steps, normaliser)
            facts = row_facts(self._states(batch), self.drafter.lm_head.weight, task)
            totals.add(batch, facts, self.teacher.vocabulary, top_tokens)
        if world.highest([float(stop.requested)])[0]:
            return None
        totals.joined(world)
        return totals

    def _states(self, batch: PackedBatch) -> list[Tensor]:
        narrow = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=narrow):
            return self.drafter.unroll(batch, self.settings.steps)

    def _task(
        self, batch: PackedBatch, row_weights: Sequence[float], normaliser: Tensor | None = None
    ) -> LossTask:
        if normaliser is None and needs_normaliser(self.settings.loss):
            normaliser = self._full_facts(batch)[0]
        return LossTask(
            kind=self.settings.loss,
            kept=batch.kept,
            teacher=batch.teacher,
            teacher_head=self.teacher.draft_head,
            log_normaliser=normaliser,
            row_weights=row_weights,
        )

    def _full_facts(self, batch: PackedBatch) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Facts in the order of step 0, made for one sample at a time so that packing cannot change them."""
        parts = []
        for i, sample_id in enumerate(batch.ids):
            known = self._facts.get(sample_id)
            if known is None:
                rows = batch.teacher[batch.query_bounds[i] : batch.query_bounds[i + 1]]
                facts = self.teacher.full_facts(rows.clone())
                known = facts.log_normaliser.cpu(), facts.top_tokens
                if self._cached_rows + len(rows) <= CACHED_ROWS:
                    self._facts[sample_id] = known
                    self._cached_rows += len(rows)
            parts.append(known)
        return torch.cat([a for a, _ in parts]).to(self.device), np.concatenate([b for _, b in parts])
