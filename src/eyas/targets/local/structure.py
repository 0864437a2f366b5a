"""Where a transformers model keeps its decoder layers, head and embedding."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from eyas.base.errors import TargetError


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a causal language model that capture and decoding touch.

    Attributes:
        decoder: the module that maps token ids to states after the final norm.
        layers: its decoder layers, in order.
        head: the linear map from these states to logits.
        cache_argument: name under which the decoder takes its key-value cache; None if it takes none.
        takes_positions: the decoder accepts ``position_ids``.
    """

    decoder: torch.nn.Module
    layers: tuple[torch.nn.Module, ...]
    head: torch.nn.Module
    cache_argument: str | None
    takes_positions: bool


def find_structure(model: Any, num_layers: int) -> ModelStructure:
    """Find decoder, layers and head of a model that has ``num_layers`` decoder layers.

    The decoder is the module that owns a list of exactly that many layers of one kind; of several
    (a vision tower of the same depth, say) the one that transformers calls the decoder.

    Raises:
        TargetError: there is no such list, or no head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise TargetError("the target has no language model head", why=f"{type(model).__name__} has none")
    found: list[tuple[torch.nn.Module, torch.nn.ModuleList]] = []
    for module in model.modules():
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == num_layers:
                found.append((module, child))
    if len(found) > 1:
        decoder = model.get_decoder()
        inside = {id(module) for module in decoder.modules()}
        found = [pair for pair in found if pair[0] is decoder] or [p for p in found if id(p[0]) in inside]
    if len(found) != 1:
        raise TargetError(
            "the target's decoder layers were not found",
            why=f"{len(found)} lists of {num_layers} layers in {type(model).__name__}",
        )
    decoder, layers = found[0]
    names = inspect.signature(decoder.forward).parameters
    cache_argument = next((name for name in ("cache", "past_key_values") if name in names), None)
    return ModelStructure(
        decoder=decoder,
        layers=tuple(layers),
        head=head,
        cache_argument=cache_argument,
        takes_positions="position_ids" in names,
    )
