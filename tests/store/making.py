"""Captured samples with known content for the tests of this floor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from eyas.base.layout import Layout
from eyas.base.seal import sealed_folder
from eyas.store.ledger import Ledger
from eyas.store.recipe import StoreRecipe, write_store_recipe
from eyas.store.samples import Sample, sample_id, write_samples
from eyas.store.segment import CapturedSample
from eyas.store.tensors import STORAGE_DTYPES, StoredTensor

RECIPE = StoreRecipe("weights", (2, 4), 8, "float32", "BF16")


def captured(
    seed: int,
    length: int = 12,
    spans: tuple[tuple[int, int], ...] = ((3, 7), (9, 12)),
    num_layers: int = 2,
    width: int = 8,
    dtype: str = "BF16",
) -> CapturedSample:
    """A sample whose tokens and states follow from ``seed``."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, length, dtype=np.int32)
    num_rows = len({row for start, end in spans for row in range(max(start - 1, 0), end - 1)})
    return CapturedSample(
        id=sample_id(tokens, spans),
        tokens=tokens,
        spans=spans,
        aux=states(rng, (length, num_layers, width), dtype),
        last=states(rng, (num_rows, width), dtype),
    )


def states(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    storage = STORAGE_DTYPES[dtype]
    if dtype == "BF16":
        return StoredTensor(dtype, rng.integers(0, 0x7F00, shape, dtype=np.uint16))
    return StoredTensor(dtype, rng.standard_normal(shape).astype(storage))


def text_sample(sample: CapturedSample, split: str = "train") -> Sample:
    """The sample that a captured one was captured for."""
    return Sample(
        id=sample.id,
        tokens=sample.tokens,
        spans=sample.spans,
        conversation=f"conversation-{sample.id[:6]}",
        source="tests",
        domain="numbers",
        split="validation" if split == "validation" else "train",
        finish_reason="stop",
        origin="given",
    )


def project(root: Path, samples: Iterable[CapturedSample]) -> Layout:
    """A project folder with sealed data/samples, store.json and a ledger that lists the samples."""
    layout = Layout(root)
    texts = [text_sample(sample) for sample in samples]
    with sealed_folder(layout.samples, {}) as folder:
        write_samples(folder, texts)
    write_store_recipe(layout.store_recipe, RECIPE)
    layout.segments.mkdir(parents=True)
    with Ledger.open(layout.ledger) as ledger:
        ledger.add_samples(text.entry for text in texts)
    return layout


def same(first: CapturedSample, second: CapturedSample) -> bool:
    """Whether two samples hold the same bits."""
    return (
        first.id == second.id
        and first.spans == second.spans
        and np.array_equal(first.tokens, second.tokens)
        and all(
            one.dtype == other.dtype and one.shape == other.shape and one.raw() == other.raw()
            for one, other in ((first.aux, second.aux), (first.last, second.last))
        )
    )
