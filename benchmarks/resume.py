"""How long a resume takes to know what is left, with a million samples in the ledger, half of them stored.

It is the decision of the extract stage itself: leases given back, the store looked at, samples listed,
batches planned. The first listing, which writes a row for each sample, happens once and is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.base.seal import sealed_folder
from eyas.stages.extract.left import find_left
from eyas.store.ledger import Ledger
from eyas.store.listing import list_samples
from eyas.store.recipe import StoreRecipe, require_store_recipe
from eyas.store.samples import SAMPLES_SCHEMA, sample_id
from eyas.store.segment import CapturedSample, encode_segment
from eyas.store.segment_header import segment_name
from eyas.store.tensors import StoredTensor

LIMIT_SECONDS, LIMIT_MEGABYTES = 5.0, 500.0
_SAMPLES_A_SEGMENT = 2000
_SAMPLES_A_PART = 8192
_SPANS = ((1, 2),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--samples-a-segment", type=int, default=_SAMPLES_A_SEGMENT)
    parser.add_argument("--folder", type=Path, help="where ledgers are made; by default a temporary folder")


def make(layout: Layout, num_samples: int, samples_a_segment: int) -> float:
    """A ledger of so many samples; every second one lies in real, very small segments.

    Returns:
        Seconds of the first listing, which writes a row for each sample.
    """
    layout.segments.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 4096, num_samples)
    states = StoredTensor("BF16", np.ones((3, 1, 1), dtype="<u2"))
    last = StoredTensor("BF16", np.ones((1, 1), dtype="<u2"))
    recipe = StoreRecipe("benchmark", (1,), 1, "bfloat16", "BF16")
    require_store_recipe(layout.store_recipe, recipe, set())
    stored = []
    for number in range(num_samples // 2):
        tokens = np.array([number, 1, 2], dtype="<i4")
        stored.append(CapturedSample(sample_id(tokens, _SPANS), tokens, _SPANS, states, last))
    rest = (f"{int(high):016x}{int(low):016x}" for high, low in
            rng.integers(0, 2**63, (num_samples - len(stored), 2)))  # fmt: skip
    ids = [*(sample.id for sample in stored), *rest]
    write_index(layout, ids, lengths)
    with Ledger.open(layout.ledger) as ledger:
        with ledger.reading() as connection:
            connection.execute("PRAGMA synchronous = OFF")  # a benchmark need not survive a power cut
        started = time.perf_counter()
        list_samples(layout, ledger)
        seconds = time.perf_counter() - started
        with ledger.transaction():
            for start in range(0, len(stored), samples_a_segment):
                group = stored[start : start + samples_a_segment]
                segment = encode_segment(group, recipe.hash)
                path = layout.segments / segment_name(start // samples_a_segment + 1, segment.checksum)
                path.write_bytes(b"".join(bytes(buffer) for buffer in segment.buffers))
                ledger.commit_segment(
                    path.name, segment.num_bytes, recipe.hash, [(s.id, len(s.tokens), 1) for s in group]
                )
        ledger.lease(ids[-100:], ledger.start_attempt())
    return seconds


def write_index(layout: Layout, ids: list[str], lengths: np.ndarray) -> None:
    """data/samples without tokens, which the decision does not read."""
    with sealed_folder(layout.samples, {}) as folder:
        for number, start in enumerate(range(0, len(ids), _SAMPLES_A_PART)):
            part = slice(start, start + _SAMPLES_A_PART)
            num_rows = len(ids[part])
            columns = {
                "id": ids[part],
                "tokens": [[]] * num_rows,
                "spans": [[]] * num_rows,
                "length": lengths[part],
                "num_supervised": np.ones(num_rows, np.int32),
            }
            texts = {name: ["benchmark"] * num_rows for name in SAMPLES_SCHEMA.names if name not in columns}
            table = pa.table({**columns, **texts}, schema=SAMPLES_SCHEMA)
            pq.write_table(table, folder / f"part-{number:05d}.parquet")


def decide(layout: Layout) -> dict[str, float]:
    """What a resume does before its first batch; seconds of each step."""
    times: dict[str, float] = {}
    started = time.perf_counter()

    def lap(name: str) -> None:
        times[name] = round(time.perf_counter() - started - sum(times.values()), 4)

    with Ledger.open(layout.ledger, create=False) as ledger:
        lap("open")
        left = find_left(layout, ledger, 16384, SilentProgress())
        lap("find_left")
        batches = left.batches()
        lap("batches")
        counts = ledger.counts()
        lap("counts")
    if sum(map(len, batches)) < counts["pending"].samples:
        raise RuntimeError(f"unexpected: {len(batches)} batches for {counts['pending'].samples} samples")
    return times


def in_a_process(root: Path) -> dict[str, Any]:
    """`decide` in a fresh process, with its largest memory."""
    code = "from benchmarks.resume import child; child()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return dict(json.loads(done.stdout))


def child() -> None:
    times = decide(Layout(Path(sys.argv[1])))
    # not getrusage: what is started by vfork has its parent's largest memory in it
    status = Path("/proc/self/status").read_text().split()
    megabytes = int(status[status.index("VmHWM:") + 1]) * 1024 / 1e6
    print(
        json.dumps(
            {
                "steps": times,
                "seconds": round(sum(times.values()), 4),
                "cpu_seconds": round(time.process_time(), 4),
                "megabytes": round(megabytes),
            }
        )
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and give the result as one record; the baseline is the limit of 5 seconds."""
    found: dict[int, dict[str, Any]] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            layout = Layout(Path(name))
            first = make(layout, size, arguments.samples_a_segment)
            found[size] = min((in_a_process(layout.root) for _ in range(3)), key=lambda one: one["seconds"])
            found[size]["first_listing_seconds"] = round(first, 2)
            found[size]["microseconds_a_sample"] = round(1e6 * found[size]["seconds"] / size, 2)
    largest = found[max(found)]
    return {
        "name": "resume",
        "value": largest["seconds"],
        "unit": "s",
        "baseline": LIMIT_SECONDS,
        "ratio": round(largest["seconds"] / LIMIT_SECONDS, 3),
        "details": {"by_samples": found, "megabytes": largest["megabytes"], "limit": LIMIT_MEGABYTES},
    }
