"""A store of random states and the models of a case, for benchmarks that run the trainer itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.training.case import Case

from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.drafter.model import EagleDrafter
from eyas.drafter.parallel import Sharding
from eyas.drafter.passes import BatchPasses
from eyas.drafter.settings import TrainSettings
from eyas.drafter.teacher import Teacher
from eyas.drafter.trainer import Trainer, TrainingPlace
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.drafter.world import World
from eyas.stages.stored_states import StoredSamples
from eyas.store.entry import SampleEntry
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.samples import last_rows, sample_id
from eyas.store.segment import CapturedSample
from eyas.store.tensors import StoredTensor


def make_samples(case: Case, count: int) -> list[CapturedSample]:
    """Samples of 128 to 384 tokens, the last three quarters of each supervised."""
    rng = np.random.default_rng(case.seed)
    samples = []
    for _ in range(count):
        length = int(rng.integers(128, 385))
        tokens = rng.integers(0, case.vocab, length, dtype=np.int32)
        spans = ((length // 4, length),)
        numbers = torch.from_numpy(rng.standard_normal((length, case.num_aux + 1, case.hidden), np.float32))
        states = numbers.to(torch.bfloat16).view(torch.uint16).numpy()
        last = np.ascontiguousarray(states[last_rows(spans, length), -1])
        aux = np.ascontiguousarray(states[:, :-1])
        samples.append(
            CapturedSample(
                sample_id(tokens, spans), tokens, spans, StoredTensor("BF16", aux), StoredTensor("BF16", last)
            )
        )
    return samples


def make_models(case: Case) -> tuple[EagleDrafter, Teacher]:
    """A drafter without weights yet and the head that teaches it; the same in every process."""
    generator = torch.Generator().manual_seed(case.seed)
    head = torch.randn(case.vocab, case.hidden, generator=generator) * case.hidden**-0.5
    vocabulary = DraftVocabulary(np.arange(case.drafts, dtype=np.int64), case.vocab)
    dtype = case.torch_dtype()
    return EagleDrafter(case.shape(), head.to(dtype)), Teacher(
        head, vocabulary, device=torch.device("cpu"), dtype=dtype
    )


def open_store(folder: Path) -> tuple[StoreReader, list[SampleEntry]]:
    """A store that `benchmarks.append.write_store` wrote: its reader, and what its ledger lists."""
    with Ledger.open_read_only(folder / "ledger.db") as ledger:
        return StoreReader(folder / "segments", ledger), list(ledger.entries())


def make_trainer(
    case: Case,
    source: StoredSamples,
    place: Path,
    *,
    world: World | None = None,
    sharding: Sharding = "ddp",
    **settings: Any,
) -> tuple[Trainer, BatchPasses]:
    """The trainer itself on samples of a store, and passes of the same models and settings.

    Args:
        place: folder for checkpoints and metrics.
        settings: of `eyas.drafter.settings.TrainSettings`, beside those that the case says.
    """
    chosen = TrainSettings(steps=case.steps, dtype=case.dtype, checkpoint_minutes=1e9, **settings)
    drafter, teacher = make_models(case)
    trainer = Trainer(
        drafter,
        teacher,
        source,
        None,
        chosen,
        TrainingPlace(place / "checkpoints", place / "metrics.jsonl", lambda path, reason: None),
        recipe={"benchmark": "of stored samples"},
        start=lambda: drafter.initialise(0),
        progress=SilentProgress(),
        stop=StopFlag(),
        world=world,
        sharding=sharding,
    )
    return trainer, BatchPasses(drafter, teacher, chosen)


def seconds_of(steps: list[dict[str, Any]]) -> list[float]:
    """How long each step but the first took, waits included: its tokens by its own rate."""
    pairs = itertools.pairwise(steps)
    return [(row["tokens"] - before["tokens"]) / row["tokens_per_second"] for before, row in pairs]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of training steps that a run has written there."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]
