"""Share of the training time in which a step waits for its batch, beside preparing none ahead."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.append import write_store
from benchmarks.training.compare import add_sizes, case_of
from benchmarks.training.stored import make_samples, make_trainer, metrics_of, open_store, seconds_of

from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import pack_by_tokens
from eyas.stages.stored_states import StoredSamples

LIMIT = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples", type=int, default=90, help="samples in the store, 128 to 384 tokens each"
    )
    parser.add_argument("--batch-tokens", type=int, default=512, help="as train.batch_tokens")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    parser.add_argument("--folder", type=Path, default=None, help="where the store is written")
    add_sizes(parser)
    parser.set_defaults(steps=3)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One epoch of the trainer itself on a real store of random states; every read hashes what it reads."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    case = case_of(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_store(folder, make_samples(case, arguments.samples))
        reader, entries = open_store(folder)
        trainer, passes = make_trainer(
            case, StoredSamples(reader, entries), folder, epochs=1, batch_tokens=arguments.batch_tokens
        )
        trainer.run()
        # the first batch cannot be prepared ahead of anything
        first, *steps = metrics_of(folder)
        waited = sum(row["data_wait_seconds"] for row in steps)
        lengths = {entry.id: entry.length for entry in entries}
        total = sum(seconds_of([first, *steps]))
        alone = _prepare_alone(passes, StoredSamples(reader, entries), lengths) * len(steps)
    return {
        "name": "data-wait",
        "value": round(waited / total, 5),
        "unit": "share of training time",
        "baseline": round(alone / (alone + total - waited), 5),
        "ratio": round((waited / total) / (alone / (alone + total - waited)), 4),
        "details": {
            "baseline_is": "the same share if each batch were prepared when its step needs it",
            "limit": LIMIT,
            "steps": len(steps),
            "seconds": round(total, 3),
            "longest_wait_seconds": round(max(row["data_wait_seconds"] for row in steps), 4),
            "prepare_seconds_a_step": round(alone / len(steps), 5),
            "threads": torch.get_num_threads(),
        },
    }


def _prepare_alone(passes: BatchPasses, samples: StoredSamples, lengths: dict[str, int]) -> float:
    """Seconds to read, hash and pack one step's batch, with nothing beside it."""
    batches = pack_by_tokens(sorted(lengths), lengths, passes.settings.batch_tokens)
    started = time.perf_counter()
    for ids in batches:
        passes.prepare(samples, ids)
    return (time.perf_counter() - started) / len(batches)
