"""The states that transformers computes, and how far others are from them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

LENGTHS = (7, 700, 33, 256, 257, 512, 90, 600)
"""Prompts shorter than a chunk of 256 tokens, of one, of one and a bit, and of three."""

SKIPPED_ROWS = 4
"""The first rows carry activations so large that they hide a wrong layer."""


def prompts(seed: int = 11, vocab: int = 49152) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, vocab) for _ in range(length)] for length in LENGTHS]


@dataclass(frozen=True)
class Reference:
    """States of one prompt by layer: ``states[k]`` is the residual stream after k layers [T, H].

    ``last`` is what the head takes; ``next_token`` is the greedy one.
    """

    states: list[torch.Tensor]
    last: torch.Tensor
    next_token: int


class ReferenceModel:
    """The target in transformers, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> Reference:
        residual: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda module, given: residual.append(given[0][0].clone()))
            for layer in self.model.model.layers
        ]
        hooks.append(
            self.model.model.norm.register_forward_pre_hook(
                lambda module, given: residual.append(given[0][0].clone())
            )
        )
        try:
            output = self.model(torch.tensor([tokens]), output_hidden_states=True)
        finally:
            for hook in hooks:
                hook.remove()
        last = self.model.model.norm(residual[-1])
        return Reference(residual, last, int(output.logits[0, -1].argmax()))

    @torch.inference_mode()
    def answer(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """Greedy tokens, and the smallest gap between the two best logits on the way."""
        given, gap = list(tokens), float("inf")
        for _ in range(count):
            best = self.model(torch.tensor([given])).logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            given.append(int(best.indices[0]))
        return given[len(tokens) :], gap


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error, without the first rows."""
    a, b = found[SKIPPED_ROWS:].double(), wanted[SKIPPED_ROWS:].double()
    return float((a - b).norm() / b.norm())


@dataclass(frozen=True)
class Dump:
    """A dump as another program reads it."""

    tokens: list[int]
    aux: torch.Tensor
    last: torch.Tensor
    said: dict[str, str]


def read_dump(path: Path) -> Dump:
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in ("tokens", "aux", "last")}
        return Dump(tensors["tokens"].tolist(), tensors["aux"], tensors["last"], dict(file.metadata()))


def check_dump(dump: Dump, tokens: list[int], wanted: Reference, name: str, tolerance: float) -> None:
    """The dump is of these tokens, and each column is nearer to its own layer than any other could be."""
    assert dump.tokens == tokens
    assert dump.said["name"] == name
    layers = json.loads(dump.said["layers"])
    assert layers == [2, 15, 27]
    assert tuple(dump.aux.shape) == (len(tokens), 3, 576)
    assert tuple(dump.last.shape) == (len(tokens), 576)
    for column, layer in enumerate(layers):
        states = dump.aux[:, column].float()
        assert distance(states, wanted.states[layer]) < tolerance
        for neighbour in (layer - 1, layer + 1):
            assert distance(states, wanted.states[neighbour]) > 4 * tolerance
    final = wanted.last if dump.said["last"] == "after-norm" else wanted.states[-1]
    assert distance(dump.last.float(), final) < tolerance
