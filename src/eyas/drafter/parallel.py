"""One drafter trained by several processes: replicated (DDP) or sharded (FSDP2).

Losses are already divided by the rows of the whole step, so gradients are summed over processes and never
averaged: two processes give what one gives with both their batches.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eyas.base.stop import StopFlag
from eyas.drafter.batch import PackedBatch
from eyas.drafter.passes import BatchPasses
from eyas.drafter.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Sharding = Literal["ddp", "fsdp"]

# of the target, alike in all; the option's old name is deprecated where there is a new one
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass(frozen=True)
class Sums:
    """What the batches of this process came to: their share of the loss, row losses of each draft step, and
    samples of batches whose loss is not finite."""

    loss: float
    rows: list[float]
    suspects: list[str]


class _Pass(nn.Module):
    """What is wrapped: the drafter with its loss, so that a process without rows takes part as well."""

    def __init__(self, passes: BatchPasses) -> None:
        super().__init__()
        self.drafter = passes.drafter
        self._passes = passes

    def forward(self, batch: PackedBatch | None, num_rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        if batch is not None:
            return self._passes.loss(batch, num_rows)
        nothing = torch.stack([(parameter * 0).sum() for parameter in self.drafter.parameters()]).sum()
        return nothing, torch.zeros(len(num_rows))


class Parallel:
    """Forward and backward passes whose gradients are those of all processes together.

    Make it when every process holds the same whole weights, and the optimizer after it: sharding replaces
    the parameters.

    Args:
        sharding: ``ddp`` keeps everything whole in each process, ``fsdp`` shards weights, gradients and
            optimizer. Neither matters for a process alone.
    """

    def __init__(self, passes: BatchPasses, world: World, sharding: Sharding) -> None:
        self.passes, self.world = passes, world
        self._module: nn.Module = _Pass(passes)
        self._sharded: FSDPModule | None = None
        self._replicated: DistributedDataParallel | None = None
        if world.alone:
            return
        with world.watched():
            if sharding == "fsdp":
                self._sharded = _sharded(self._module, passes.device.type, world.size)
            else:
                never: dict[str, Any] = {_SYNC_BUFFERS: False}
                self._replicated = DistributedDataParallel(self._module, init_sync=False, **never)
                self._replicated.register_comm_hook(None, lambda state, bucket: _summed(bucket))
                self._module = self._replicated

    @property
    def whole_everywhere(self) -> bool:
        """Whether each process holds all weights and optimizer state at any time."""
        return self._sharded is None

    def add_gradients(
        self, batches: Sequence[PackedBatch], num_rows: Sequence[int], stop: StopFlag
    ) -> Sums | None:
        """Add the gradients of all processes' batches; every process has to call it.

        Args:
            num_rows: rows supervised at each draft step in the whole optimizer step, all processes counted.
            stop: heard between two batches of a process alone; several stop between steps.

        Returns:
            None when a stop was asked for: not all gradients are there.

        Raises:
            WorkerLost: another process is gone; no gradient may be used.
        """
        total, sums, suspects = 0.0, [0.0] * len(num_rows), list[str]()
        parts: list[PackedBatch | None] = [*batches]
        if not parts and not self.world.alone:
            parts.append(None)
        for number, batch in enumerate(parts):
            if number and self.world.alone and stop.requested:
                return None
            with self.world.watched(), self._exchanging(number == len(parts) - 1):
                loss, step_sums = self._module(batch, num_rows)
                loss.backward()
            share = float(loss.detach())
            total += share
            sums = [a + float(b) for a, b in zip(sums, step_sums.tolist(), strict=True)]
            if batch is not None and not math.isfinite(share):
                suspects += batch.ids
        return Sums(total, sums, suspects)

    @contextlib.contextmanager
    def _exchanging(self, last: bool) -> Iterator[None]:
        """Exchange gradients only behind the last batch; until then they add up here."""
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(last)
            self._sharded.set_reshard_after_backward(last)
        with contextlib.ExitStack() as stack:
            if self._replicated is not None and not last:
                stack.enter_context(self._replicated.no_sync())
            yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Whole weights in every process, for work beside training; all processes enter it together."""
        if self._sharded is None:
            yield
            return
        with self.world.watched():
            self._sharded.unshard()
        try:
            yield
        finally:
            self._sharded.reshard()


def _sharded(module: nn.Module, device_type: str, size: int) -> FSDPModule:
    """Shard a module's parameters in place; gradients are summed, not averaged."""
    # a second to load, and seldom needed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made = fully_shard(module, mesh=init_device_mesh(device_type, (size,)))
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    return made


def _summed(bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's exchange without its division by the number of processes."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
