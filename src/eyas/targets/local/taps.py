"""Taking the residual stream between decoder layers while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from eyas.base.errors import TargetError

Take = Callable[[int, torch.Tensor], None]


@contextmanager
def tapped(layers: Sequence[torch.nn.Module], wanted: Sequence[int], take: Take) -> Iterator[None]:
    """Call ``take(slot, residual)`` for each wanted layer id during forward passes inside the block.

    Layer id k is the residual stream after k decoder layers: 0 is what the first layer gets, n what the
    last one gives, before the final norm. ``residual`` is [B, T, H] and must be copied if it is kept.

    Raises:
        TargetError: a layer id is outside 0..n.
    """
    for layer_id in wanted:
        if not 0 <= layer_id <= len(layers):
            raise TargetError(
                f"the target has no layer {layer_id}",
                why=f"ids go from 0 (embeddings) to {len(layers)} (before the final norm)",
            )
    with ExitStack() as stack:
        for slot, layer_id in enumerate(wanted):
            if layer_id == 0:
                handle = layers[0].register_forward_pre_hook(_before(slot, take), with_kwargs=True)
            else:
                handle = layers[layer_id - 1].register_forward_hook(_after(slot, take))
            stack.callback(handle.remove)
        yield


def _before(slot: int, take: Take) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(slot, args[0] if args else kwargs["hidden_states"])

    return hook


def _after(slot: int, take: Take) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        take(slot, output[0] if isinstance(output, tuple | list) else output)

    return hook
