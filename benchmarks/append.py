"""How fast samples go into the store, against a bare sequential write and against torch.save per sample."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.store.ledger import Ledger
from eyas.store.samples import SampleEntry, sample_id
from eyas.store.segment import CapturedSample
from eyas.store.tensors import StoredTensor
from eyas.store.writer import StoreWriter

_NUM_LAYERS, _WIDTH = 3, 7168
_ROUNDS = 4


def make_samples(sample_bytes: int, total_bytes: int) -> list[CapturedSample]:
    """Samples of about ``sample_bytes`` with states as wide as Kimi-K2.5's, every row supervised."""
    rng = np.random.default_rng(0)
    length = sample_bytes // (2 * _WIDTH * (_NUM_LAYERS + 1))
    samples = []
    for _ in range(max(1, total_bytes // sample_bytes)):
        tokens = rng.integers(0, 160_000, length, dtype=np.int32)
        spans = ((0, length),)
        aux = rng.integers(0, 1 << 15, (length, _NUM_LAYERS, _WIDTH), dtype=np.uint16)
        last = rng.integers(0, 1 << 15, (length - 1, _WIDTH), dtype=np.uint16)
        samples.append(
            CapturedSample(
                sample_id(tokens, spans), tokens, spans, StoredTensor("BF16", aux), StoredTensor("BF16", last)
            )
        )
    return samples


def write_raw(folder: Path, samples: list[CapturedSample]) -> None:
    """All bytes into one file, one fdatasync."""
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)
    for sample in samples:
        for array in (sample.aux.array, sample.last.array, sample.tokens):
            view = array.reshape(-1).view(np.uint8).data
            while len(view):
                view = view[os.write(descriptor, view) :]
    os.fdatasync(descriptor)
    os.close(descriptor)


def write_torch(folder: Path, samples: list[CapturedSample]) -> None:
    """torch.save, fsync and rename, one file a sample."""
    for sample in samples:
        tensors = {
            "aux": torch.from_numpy(sample.aux.array).view(torch.bfloat16),
            "last": torch.from_numpy(sample.last.array).view(torch.bfloat16),
            "tokens": torch.from_numpy(sample.tokens),
        }
        path = folder / f"{sample.id}.pt"
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path.with_suffix(".tmp"), path)


def write_store(folder: Path, samples: list[CapturedSample]) -> None:
    """The store with everything on: identity, checksums, allocation, fsync, rename, ledger."""
    with Ledger.open(folder / "ledger.db") as ledger:
        ledger.add_samples(
            SampleEntry(sample.id, len(sample.tokens), sample.num_supervised, "train", "benchmark")
            for sample in samples
        )
        with StoreWriter(folder / "segments", ledger, "benchmark") as writer:
            for sample in samples:
                writer.add(sample)


def timed(
    write: Callable[[Path, list[CapturedSample]], None], samples: list[CapturedSample], root: Path
) -> float:
    """Seconds of one run in an empty folder, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(dir=root))
    os.sync()
    started = time.perf_counter()
    write(folder, samples)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds


def measure(sample_bytes: int, total_bytes: int, root: Path) -> dict[str, float]:
    """Best MB/s of each way of writing; runs take turns, so that a slow moment hits all of them."""
    samples = make_samples(sample_bytes, total_bytes)
    num_bytes = sum(sample.nbytes for sample in samples)
    ways = {"raw": write_raw, "torch_save": write_torch, "store": write_store}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(_ROUNDS):
        for name, write in ways.items():
            best[name] = min(best[name], timed(write, samples, root))
    return {name: round(num_bytes / 1e6 / seconds, 1) for name, seconds in best.items()}


def run(root: Path | None = None) -> dict[str, Any]:
    """Measure and give the result as one record."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        small = measure(11_000_000, 512_000_000, Path(folder))
        large = measure(124_000_000, 512_000_000, Path(folder))
    return {
        "name": "append",
        "value": small["store"],
        "unit": "MB/s",
        "baseline": small["raw"],
        "ratio": round(small["store"] / small["raw"], 3),
        "details": {
            "11_MB_samples": small | {"to_torch_save": round(small["store"] / small["torch_save"], 2)},
            "124_MB_samples": large | {"to_raw": round(large["store"] / large["raw"], 3)},
            "best_of": _ROUNDS,
        },
    }
