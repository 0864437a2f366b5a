"""Projects whose store has a bound, and what a trainer was really given."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.base.layout import Layout
from eyas.drafter.passes import BatchPasses
from eyas.store.ledger import Ledger
from tests.faults.forked import run_child
from tests.projects import make_project

BOUND = 620_000
"""Holds the validation samples and a few training samples of `bounded_project`."""
QUICK = {
    "validation = 0.25": "validation = 0.15",
    "batch_tokens = 160\nsteps": "batch_tokens = 80\nsteps",
    "max_new_tokens = 8": "max_new_tokens = 4",
    "segment_seconds = 0.05": "segment_seconds = 0.01",
    "[evaluate]": "[evaluate]\nlimit = 1",
}
DISK = '\n[disk]\nreserve = "0"\nwarn = "0"\nlook_again_seconds = 0.05\n'


def bounded_project(
    root: Path, model: Path, *, count: int = 12, bound: int | None = BOUND, more: str = "", **changes: str
) -> Path:
    """A small project whose training samples take several waves.

    Args:
        bound: of the store; None for none.
        more: lines for ``[store]``.
        changes: ``epochs="1.5"`` and so on, of ``[train]``.
    """
    make_project(root, model, count=count, more=DISK)
    text = (root / "eyas.toml").read_text()
    for old, new in QUICK.items():
        assert old in text, old
        text = text.replace(old, new)
    lines = [f'max_bytes = "{bound}"'] if bound is not None else []
    text = text.replace("[store]", "\n".join(["[store]", *lines, more]))
    for key, value in changes.items():
        old = next(line for line in text.splitlines() if line.startswith(f"{key} ="))
        text = text.replace(old, f"{key} = {value}")
    (root / "eyas.toml").write_text(text)
    return root


def run_into_the_waves(root: Path, wanted: Callable[[], bool]) -> int:
    """Kill a run, later each time, until what is wanted is there or it has ended; the last exit code."""
    patience = 1.5
    while True:
        code = run_child(root, kill_after_seconds=patience)
        if code == 0 or wanted():
            return code
        patience *= 1.25


def waves_of(root: Path) -> dict[str, Any]:
    """The record of waves as it lies on disk."""
    return dict(json.loads((root / "store" / "waves.json").read_text()))


def states_of(root: Path) -> dict[str, int]:
    """Samples in each state that has any."""
    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        return {state: count.samples for state, count in ledger.counts().items() if count.samples}


def ids_of(root: Path, split: str) -> set[str]:
    """Samples of a split, from data/samples itself."""
    from eyas.store.samples import read_samples

    return {sample.id for sample in read_samples(Layout(root).samples) if sample.split == split}


def store_bytes(root: Path) -> int:
    """Bytes of all files in the store now; a file that goes meanwhile counts no more."""
    total = 0
    for folder, _, names in os.walk(root / "store"):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def noting_batches(path: Path) -> Callable[[], None]:
    """A plan: ids of every batch whose gradients are taken are appended to ``path``, a line a batch."""

    def plant() -> None:
        real = BatchPasses.loss

        def loss(self: BatchPasses, batch: Any, *arguments: Any) -> Any:
            with open(path, "a") as file:
                file.write(" ".join(batch.ids) + "\n")
            return real(self, batch, *arguments)

        BatchPasses.loss = loss  # type: ignore[method-assign]

    return plant


def trained_counts(path: Path) -> Counter[str]:
    """How often each sample was trained on."""
    return Counter(path.read_text().split())


def messages(root: Path) -> str:
    """What was said in all attempts, a line each."""
    lines = []
    for path in sorted((root / "logs").glob("attempt-*/events.jsonl")):
        events = map(json.loads, path.read_text().splitlines())
        lines += [event["detail"]["text"] for event in events if event["kind"] == "message"]
    return "\n".join(lines)


def change(root: Path, old: str, new: str) -> None:
    """Put other words into a project's configuration."""
    text = (root / "eyas.toml").read_text()
    assert old in text
    (root / "eyas.toml").write_text(text.replace(old, new))
