"""How fast a deep verify reads a store, against a plain reader of the same files."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.append import make_samples, write_store

from eyas.base.layout import Layout
from eyas.pipeline.verify import NUM_WORKERS
from eyas.store.ledger import Ledger
from eyas.store.scrub import deep

_READ_BYTES = 1 << 20  # the fastest plain reader of 128 KiB to 4 MiB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=512, help="size of the store")
    parser.add_argument("--rounds", type=int, default=4, help="best of so many")
    parser.add_argument("--folder", type=Path, help="where the store is made; by default a temporary folder")


def drop_cache(layout: Layout) -> None:
    """Ask the system to forget the pages of all segments."""
    for path in layout.segments.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(layout: Layout) -> None:
    """Every byte of every segment into one buffer, one file after the other."""
    buffer = bytearray(_READ_BYTES)
    for path in sorted(layout.segments.iterdir()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and give the result as one record: from the disk, and beside it from the cache."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        layout = Layout(Path(name))
        layout.store.mkdir()
        write_store(layout.store, make_samples(11_000_000, arguments.megabytes * 1_000_000))
        num_bytes = sum(path.stat().st_size for path in layout.segments.iterdir())
        with Ledger.open(layout.store / "ledger.db") as ledger:
            best = dict.fromkeys(("plain_cold", "verify_cold", "plain_warm", "verify_warm"), float("inf"))

            def scrub(from_disk: bool) -> None:
                faults = deep(layout, ledger, num_workers=NUM_WORKERS, from_disk=from_disk)
                if any(fault.kind != "recipe_file" for fault in faults):
                    raise RuntimeError(f"the store is damaged: {faults[0]}")

            for _ in range(arguments.rounds):
                drop_cache(layout)
                best["plain_cold"] = min(best["plain_cold"], seconds_of(lambda: read_plainly(layout)))
                best["verify_cold"] = min(best["verify_cold"], seconds_of(lambda: scrub(True)))
                read_plainly(layout)
                best["plain_warm"] = min(best["plain_warm"], seconds_of(lambda: read_plainly(layout)))
                best["verify_warm"] = min(best["verify_warm"], seconds_of(lambda: scrub(False)))
    speed = {key: round(num_bytes / 1e6 / seconds, 1) for key, seconds in best.items()}
    cold, warm = speed["verify_cold"] / speed["plain_cold"], speed["verify_warm"] / speed["plain_warm"]
    return {
        "name": "verify",
        "value": speed["verify_cold"],
        "unit": "MB/s",
        "baseline": speed["plain_cold"],
        "ratio": round(cold, 3),
        "details": speed | {"warm_ratio": round(warm, 3), "bytes": num_bytes, "workers": NUM_WORKERS},
    }
