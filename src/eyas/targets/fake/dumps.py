"""Dumps of the fake server: real states of a small model, spoiled when a fault says so."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

from eyas.targets.local.generate import Generated, SamplingSettings, generate
from eyas.targets.local.model import LocalTarget


@dataclass(frozen=True)
class States:
    """What one dump holds: tokens [T], aux [T, A, H], last [T, H], the layers' ids and the next token."""

    tokens: tuple[int, ...]
    aux: torch.Tensor
    last: torch.Tensor
    layers: tuple[int, ...]
    token: int


@dataclass(frozen=True)
class Label:
    """The metadata of a dump besides its states."""

    name: str
    engine: str
    last: str
    boot_id: str
    server_started: str


class TinyModel:
    """A small model that answers and gives states, one request at a time, and remembers them.

    Args:
        before_norm: ``last`` is the residual stream after all layers, as vLLM gives it.
    """

    def __init__(self, target: LocalTarget, layers: Sequence[int], *, before_norm: bool) -> None:
        self.target, self.layers, self.before_norm = target, tuple(layers), before_norm
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], States] = {}
        self._lock = threading.Lock()

    def states(self, tokens: Sequence[int], layers: Sequence[int] | None = None) -> States:
        """States of a prompt at these layers (the server's own by default)."""
        wanted, key = tuple(layers or self.layers), tuple(int(token) for token in tokens)
        with self._lock:
            if (key, wanted) not in self._known:
                self._known[key, wanted] = self._compute(key, wanted)
            return self._known[key, wanted]

    def _compute(self, tokens: tuple[int, ...], layers: tuple[int, ...]) -> States:
        depth = self.target.facts.num_layers
        found = self.target.capture([list(tokens)], [*layers, depth])[0]
        with torch.no_grad():
            logits = self.target.logits(found.last[-1:].to(self.target.device))[0]
        last = found.aux[:, -1] if self.before_norm else found.last
        aux = found.aux[:, :-1].contiguous()
        return States(tokens, aux, last.contiguous(), layers, int(logits.argmax()))

    def answer(self, prompt: Sequence[int], settings: SamplingSettings) -> Generated:
        """One answer."""
        with self._lock:
            return generate(self.target, [list(prompt)], settings)[0]


def spoiled(kind: str, states: States, model: TinyModel) -> States:
    """States with one fault in them."""
    aux, last, tokens = states.aux.clone(), states.last.clone(), states.tokens
    row = len(tokens) // 2
    if kind == "short":
        cut = max(1, len(tokens) // 3)
        return replace(states, tokens=tokens[cut:], aux=aux[cut:], last=last[cut:])
    if kind == "tokens":
        other = (*tokens[:-1], (tokens[-1] + 1) % model.target.facts.vocab_size)
        return model.states(other)
    if kind == "wrong-layer":
        below = tuple(max(0, layer - 1) for layer in states.layers)
        return model.states(tokens, below)
    if kind == "wrong-width":
        return replace(states, aux=aux[..., :-2].contiguous(), last=last[..., :-2].contiguous())
    if kind == "wrong-dtype":
        other_dtype = torch.float16 if aux.dtype != torch.float16 else torch.float32
        return replace(states, aux=aux.to(other_dtype), last=last.to(other_dtype))
    if kind in ("nan", "infinite"):
        aux[row, -1, 3] = float("nan") if kind == "nan" else float("-inf")
    elif kind == "zero":
        aux[:, 0] = 0
    elif kind == "constant":
        aux[row, 0] = 0.5
    elif kind == "wrong-model":
        aux, last = aux.roll(1, dims=-1) * 1.5, last.roll(7, dims=-1)
    return replace(states, aux=aux, last=last)


def encode(states: States, label: Label) -> bytes:
    """A dump's bytes, checksum included."""
    tensors = {
        "aux": states.aux.contiguous(),
        "last": states.last.contiguous(),
        "tokens": torch.tensor(states.tokens, dtype=torch.int64),
    }
    about = {
        "eyas_dump": "1",
        "name": label.name,
        "request_id": f"fake-{label.name}",
        "engine": label.engine,
        "layers": json.dumps(list(states.layers)),
        "last": label.last,
        "boot_id": label.boot_id,
        "server_started": label.server_started,
    }
    plain = save(tensors, about)
    (length,) = struct.unpack("<Q", plain[:8])
    about["checksum"] = "xxh3_128:" + xxhash.xxh3_128_hexdigest(plain[8 + length :])
    return bytes(save(tensors, about))


def write_dump(folder: Path, name: str, content: bytes, *, age_seconds: float = 0.0) -> None:
    """Put a dump in place as a server does: another name first, then the final one."""
    temporary, final = folder / f"{name}.tmp", folder / f"{name}.dump"
    temporary.write_bytes(content)
    if age_seconds:
        then = time.time() - age_seconds
        os.utime(temporary, (then, then))
    os.replace(temporary, final)


def write_error(folder: Path, name: str, why: str) -> None:
    """Say in a dump's place why there is none."""
    temporary = folder / f"{name}.tmp"
    temporary.write_text(json.dumps({"name": name, "why": why}))
    os.replace(temporary, folder / f"{name}.err")
