"""How fast batches are built from a store in the page cache, against torch.load of the same samples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.append import make_samples, write_store, write_torch

from eyas.drafter.kernels.compiled import copy_rows
from eyas.stages.stored_states import to_torch
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader

_SAMPLES_PER_BATCH = 4
_ROUNDS = 20


def read_torch(folder: Path, order: list[str], batch: torch.Tensor) -> None:
    """torch.load each sample (weights only), then copy its states into the batch."""
    for number, sample in enumerate(order):
        loaded = torch.load(folder / f"{sample}.pt", weights_only=True)
        aux, last = loaded["aux"].flatten(1), loaded["last"]
        place = batch[number % _SAMPLES_PER_BATCH]
        place[: len(aux), : aux.shape[1]].copy_(aux)
        place[: len(last), aux.shape[1] :].copy_(last)


def read_store(reader: StoreReader, order: list[str], batch: torch.Tensor) -> None:
    """Views into mapped segments, as the trainer takes them, copied once: into the batch."""
    for number, sample in enumerate(order):
        stored = reader.sample(sample)
        aux, last = to_torch(stored.aux).flatten(1), to_torch(stored.last)
        place = batch[number % _SAMPLES_PER_BATCH]
        copy_rows(place[: len(aux), : aux.shape[1]], aux)
        copy_rows(place[: len(last), aux.shape[1] :], last)


def run(root: Path | None = None) -> dict[str, Any]:
    """Measure and give the result as one record."""
    samples = make_samples(11_000_000, 256_000_000)
    order = [samples[index].id for index in np.random.default_rng(1).permutation(len(samples))]
    num_bytes = sum(sample.aux.nbytes + sample.last.nbytes for sample in samples)
    length, num_layers, width = samples[0].aux.shape
    batch = torch.zeros(_SAMPLES_PER_BATCH, length, (num_layers + 1) * width, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        write_torch(folder, samples)
        write_store(folder, samples)
        with Ledger.open_read_only(folder / "ledger.db") as ledger:
            reader = StoreReader(folder / "segments", ledger)
        ways: dict[str, Callable[[], None]] = {
            "torch_load": lambda: read_torch(folder, order, batch),
            "store": lambda: read_store(reader, order, batch),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(_ROUNDS):
            for way, read in ways.items():
                started = time.perf_counter()
                read()
                best[way] = min(best[way], time.perf_counter() - started)
    rate = {way: round(num_bytes / 1e6 / seconds, 1) for way, seconds in best.items()}
    return {
        "name": "read",
        "value": rate["store"],
        "unit": "MB/s",
        "baseline": rate["torch_load"],
        "ratio": round(rate["store"] / rate["torch_load"], 2),
        "details": {"sample_bytes": samples[0].nbytes, "samples": len(samples), "best_of": _ROUNDS},
    }
