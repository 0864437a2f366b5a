"""One of the processes that train together: ``python -m benchmarks.training.rank NAME BRIEF``.

It says that it is ready, waits for a line, trains and answers with what it took. Torch gets its
threads from the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.case import Case
from benchmarks.training.stored import make_models, metrics_of, seconds_of

from eyas.base.memory import keep_freed_memory
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.drafter.batch import TrainingSample
from eyas.drafter.settings import TrainSettings
from eyas.drafter.trainer import Trainer, TrainingPlace
from eyas.drafter.world import World
from eyas.stages.stored_states import StoredSamples
from eyas.stages.train.meeting import LOCAL, Board, leave
from eyas.store.entry import SampleEntry
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader

EPOCHS = 2
"""Only the second one counts: in the first, kernels are still made for each number of rows that is new."""


def main() -> None:
    brief = json.loads(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr
    rank, size = brief["rank"], brief["size"]
    keep_freed_memory()
    source = _Counted(*_stored(Path(brief["store"])))
    trainer, place = _trainer(brief, World(rank, size), source)
    if size > 1:
        Board(LOCAL, brief["port"], serve=False).join(rank, size, "cpu", brief["meeting"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    sys.stdin.readline()
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.run()
    answer: dict[str, Any] = {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "own_tokens": source.tokens,
    }
    if rank == 0:
        rows = metrics_of(place)
        steps = rows[len(rows) // EPOCHS - 1 :]
        answer |= {
            "tokens": steps[-1]["tokens"] - steps[0]["tokens"],
            "seconds": sum(seconds_of(steps)),
            "losses": [row["loss"] for row in rows],
        }
    if size > 1:
        leave()
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # gloo's threads would hold it up


class _Counted(StoredSamples):
    """Counts the tokens of what is loaded."""

    tokens = 0

    def load(self, ids: Sequence[str]) -> list[TrainingSample]:
        self.tokens += sum(self.lengths()[name] for name in ids)
        return super().load(ids)


def _stored(store: Path) -> tuple[StoreReader, list[SampleEntry]]:
    with Ledger.open_read_only(store / "ledger.db") as ledger:
        return StoreReader(store / "segments", ledger), list(ledger.entries())


def _trainer(brief: dict[str, Any], world: World, source: StoredSamples) -> tuple[Trainer, Path]:
    case, place = Case(**brief["case"]), Path(brief["place"])
    place.mkdir(parents=True, exist_ok=True)
    settings = TrainSettings(
        epochs=EPOCHS,
        batch_tokens=brief["batch_tokens"],
        accumulate=brief["accumulate"],
        steps=case.steps,
        dtype=case.dtype,
        checkpoint_minutes=1e9,
    )
    drafter, teacher = make_models(case)
    trainer = Trainer(
        drafter,
        teacher,
        source,
        None,
        settings,
        TrainingPlace(place / "checkpoints", place / "metrics.jsonl", lambda path, reason: None),
        recipe={"benchmark": "ranks"},
        start=lambda: drafter.initialise(0),
        progress=SilentProgress(),
        stop=StopFlag(),
        world=world,
        sharding=brief["sharding"],
    )
    return trainer, place


if __name__ == "__main__":
    main()
