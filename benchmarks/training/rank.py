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
from benchmarks.training.stored import make_trainer, metrics_of, open_store, seconds_of

from eyas.base.memory import keep_freed_memory
from eyas.drafter.batch import TrainingSample
from eyas.drafter.world import World
from eyas.stages.stored_states import StoredSamples
from eyas.stages.train.meeting import LOCAL, Board, leave

EPOCHS = 2
"""Only the second one counts: in the first, kernels are still made for each number of rows that is new."""


def main() -> None:
    brief = json.loads(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr
    rank, size = brief["rank"], brief["size"]
    keep_freed_memory()
    source, place = _Counted(*open_store(Path(brief["store"]))), Path(brief["place"])
    place.mkdir(parents=True, exist_ok=True)
    trainer, _ = make_trainer(
        Case(**brief["case"]),
        source,
        place,
        world=World(rank, size),
        sharding=brief["sharding"],
        epochs=EPOCHS,
        batch_tokens=brief["batch_tokens"],
        accumulate=brief["accumulate"],
    )
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


if __name__ == "__main__":
    main()
