"""Extract and train side by side within a bound on the store, beside one after the other without a bound.

The target is a fake server in this process that takes a fixed time for each request, as one elsewhere does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.base.files import tree_bytes
from eyas.base.progress import SilentProgress
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.pipeline.order import STAGES, stage_named
from eyas.pipeline.run import run as run_stages
from eyas.stages.project import Project
from eyas.store.ledger import Ledger

CONFIG = """
format = 1
[target]
model = "{model}"
dtype = "float32"
device = "cpu"
[data]
max_seq_len = 256
validation = 0.1
[[data.sources]]
path = "prompts.jsonl"
[regenerate]
max_new_tokens = 24
[store]
segment_mib = 1
segment_seconds = 0.5
[train]
epochs = {epochs}
batch_tokens = 256
steps = 3
validations = 1
{more}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of a small target")
    parser.add_argument("--prompts", type=int, default=120, help="prompts of one turn")
    parser.add_argument("--epochs", type=float, default=6, help="as train.epochs")
    parser.add_argument("--waves", type=int, default=5, help="about so many waves")
    parser.add_argument("--seconds", type=float, default=0.15, help="that the server takes for a request")
    parser.add_argument("--folder", type=Path, default=None, help="where the projects lie")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers come from the target in this process first; then captures through the server."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, _server(arguments, Path(name)) as more:
        whole = _project(Path(name) / "whole", arguments, more)
        seconds = _timed(whole)
        stored = tree_bytes(whole / "store")
        bound = round(stored * (1.4 * 2 / arguments.waves + 0.2))
        bounded = _project(Path(name) / "waves", arguments, more, bound)
        with _watched(bounded) as most:
            in_waves = _timed(bounded)
        record = json.loads((bounded / "store" / "waves.json").read_text())
        both, capture, train = _at_work(bounded)
    return {
        "name": "waves",
        "value": round(in_waves, 2),
        "unit": "s",
        "baseline": round(seconds, 2),
        "ratio": round(in_waves / seconds, 3),
        "details": {
            "waves": record["waves"],
            "captures": record["captures"],
            "bound_bytes": bound,
            "most_bytes": most[0],
            "unbounded_bytes": stored,
            "capture_seconds": round(capture, 2),
            "train_seconds": round(train, 2),
            "both_seconds": round(both, 2),
            "overlap": round(both / min(capture, train), 3),
        },
    }


@contextmanager
def _server(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A fake server that captures; the tables of ``eyas.toml`` that find it."""
    from eyas.targets.fake.dumps import TinyModel
    from eyas.targets.fake.faults import parse_fault
    from eyas.targets.fake.server import FakeServer
    from eyas.targets.fake.settings import FakeSettings
    from eyas.targets.local.model import LocalTarget

    dumps = folder / "dumps"
    dumps.mkdir()
    target = LocalTarget.load(arguments.model)
    settings = FakeSettings(
        engine="vllm",
        mode="capture",
        model_folder=arguments.model,
        dump_folder=dumps,
        faults=(parse_fault(f"slow@1+:{arguments.seconds}"),),
    )
    server = FakeServer(TinyModel(target, target.facts.default_aux_layers(), before_norm=True), settings)
    try:
        yield (
            f'[serve]\nurls = ["{server.url}"]\ndump_dir = "{dumps}"\n'
            "[client]\ntokens_in_flight = 60\nfirst_byte_seconds = 60\ndump_seconds = 60\n"
        )
    finally:
        server.close()


def _project(root: Path, arguments: argparse.Namespace, more: str, bound: int | None = None) -> Path:
    root.mkdir()
    lines = [json.dumps({"turns": [f"tell {i} about the number {i * 7}"]}) for i in range(arguments.prompts)]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    text = CONFIG.format(model=arguments.model.resolve(), epochs=arguments.epochs, more=more)
    if bound is not None:
        text = text.replace("[store]", f'[store]\nmax_bytes = "{bound}"')
    (root / "eyas.toml").write_text(text)
    return root


def _timed(root: Path) -> float:
    """Seconds of extract and train through the server; answers are made before."""
    before = [stage_named("prepare"), stage_named("regenerate")]
    run_stages(Project.open(root), verb="run", progress=lambda stage: SilentProgress(), stages=before)
    project = Project.open(root, ("target.kind=vllm",))
    started = time.monotonic()
    stages = [stage for stage in STAGES if stage.name in ("extract", "train")]
    run_stages(project, verb="run", progress=lambda stage: SilentProgress(), stages=stages)
    return time.monotonic() - started


@contextmanager
def _watched(root: Path) -> Iterator[list[int]]:
    """The largest size of the store while the block runs, looked at every few milliseconds."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], tree_bytes(root / "store"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _at_work(root: Path) -> tuple[float, float, float]:
    """Seconds in which both were at work, in which captures came in, and in which training ran."""
    from eyas.base.clock import parse_time

    def at(text: str) -> float:
        moment = parse_time(text)
        assert moment is not None
        return moment.timestamp()

    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        segments = [*ledger.segments(), *ledger.segments(state="released")]
    # a segment closes half a second after its first sample at the latest
    captures = _joined([(at(s.committed_at) - 0.5, at(s.committed_at)) for s in segments])
    trains, began = [], 0.0
    for event in read_events(attempt_folders(root / "logs")[-1]):
        if event.get("stage") == "train" and event["event"] == "stage started":
            began = at(event["at"])
        elif event.get("stage") == "train" and event["event"] == "stage ended":
            trains.append((began, at(event["at"])))
    both = sum(
        max(0.0, min(end, last) - max(start, first)) for start, end in captures for first, last in trains
    )
    return both, sum(end - start for start, end in captures), sum(end - start for start, end in trains)


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
