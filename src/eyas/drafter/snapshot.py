"""A copy of weights and optimizer in host memory, and the way back from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.model import EagleDrafter
from eyas.drafter.world import World

_AVERAGES = {"average": "exp_avg", "square": "exp_avg_sq"}
_FC = "fc.weight"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds beside its state: copies that later steps do not change.

    Attributes:
        model: by the names that engines load.
        optimizer: ``average/NAME``, ``square/NAME``, ``count/NAME``, ``aux_sizes``, ``rng/cpu``.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def take_snapshot(
    drafter: EagleDrafter, optimizer: torch.optim.Optimizer, world: World | None = None
) -> Snapshot | None:
    """Copy everything; all processes call it together, the first gets the copy and the others None.

    Raises:
        WorkerLost: another process is gone.
    """
    world = world or World()
    model: dict[str, Tensor] = {}
    moved = {"rng/cpu": torch.get_rng_state(), "aux_sizes": drafter.fc.scale.detach().to("cpu", copy=True)}
    for name, parameter in drafter.named_parameters():
        weight = _copied(parameter, world)
        state = optimizer.state.get(parameter) or {}
        averages = {f"{kind}/{name}": _copied(state[key], world) for kind, key in _AVERAGES.items() if state}
        if weight is None:
            continue
        model[name] = drafter.fc.plain(weight) if name == _FC else weight
        moved |= {key: average for key, average in averages.items() if average is not None}
        if state:
            moved[f"count/{name}"] = state["step"].detach().to("cpu", copy=True).reshape(())
    return Snapshot(model, moved) if world.first else None


def spread_weights(drafter: EagleDrafter, world: World) -> None:
    """Give every process the first one's weights; call it before they are wrapped or sharded."""
    for parameter in drafter.parameters():
        world.spread(parameter.data)
    world.spread(drafter.fc.scale)


def put_optimizer(
    tensors: Mapping[str, Tensor], drafter: EagleDrafter, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Give the optimizer of every process the state that the first one has in ``tensors``.

    Raises:
        KeyError: a tensor is missing.
        WorkerLost: another process is gone.
    """
    counts = world.from_first(
        {name[6:]: float(count) for name, count in tensors.items() if name.startswith("count/")}
    )
    for name, parameter in drafter.named_parameters():
        if name not in counts:
            continue
        # fused optimizers keep the count beside the weights, others in host memory
        device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
        state: dict[str, Tensor] = {
            "step": torch.tensor(counts[name], dtype=torch.float32, device=device),
        }
        for kind, key in _AVERAGES.items():
            state[key] = _placed(tensors[f"{kind}/{name}"] if world.first else None, parameter, world)
        optimizer.state[parameter] = state


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor lies in several processes (a DTensor, whose module takes a second to load)."""
    return hasattr(tensor, "full_tensor")


def _copied(tensor: Tensor, world: World) -> Tensor | None:
    """A whole copy in host memory, in the first process only."""
    tensor = tensor.detach()
    if is_sharded(tensor):
        with world.watched():
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor.to("cpu", copy=True).contiguous() if world.first else None


def _placed(whole: Tensor | None, parameter: Tensor, world: World) -> Tensor:
    """A tensor like a parameter, from the first process's whole one."""
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if whole is not None:
        made.copy_(whole)
    if is_sharded(parameter):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        with world.watched():
            return distribute_tensor(made, parameter.device_mesh, parameter.placements)
    world.spread(made)
    return made
