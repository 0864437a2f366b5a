"""Tokens per second of extraction into the store beside the bare forward pass over the same batches."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "extract"

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 0.9


@dataclass
class Rates:
    """Tokens per second of each round, by the clock and by CPU seconds (all threads added).

    On a machine with other load the second is the steadier comparison.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, num_tokens: int, seconds: tuple[float, float]) -> None:
        self.wall.append(num_tokens / seconds[0])
        self.cpu.append(num_tokens / seconds[1])


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = _now()
    return wall - started[0], cpu - started[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = REPOSITORY / ".models" / "smollm2-135m-instruct"
    parser.add_argument(
        "--model", type=Path, default=default, help="folder of the target; `make demo` makes it"
    )
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of one round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each, in turn; the best counts")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="as extract.batch_tokens")
    parser.add_argument("--dtype", default="auto", help="arithmetic of the target")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    parser.add_argument("--folder", type=Path, default=None, help="where the store is written")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Run both in turn on one loaded target; each round of extraction fills a new store.

    The bare pass computes the states after the final norm and nothing else: no head, no copies, no
    checks. Extraction is the stage's own code, from the plan of batches to the last commit.
    """
    if not (arguments.model / "config.json").is_file():
        raise SystemExit(f"there is no target in {arguments.model}: make demo, or give --model FOLDER")
    import transformers

    from eyas.stages.extract import work
    from eyas.targets.dtype import resolve_device, resolve_dtype
    from eyas.targets.local.model import LocalTarget

    _set_threads(arguments.threads)
    device = resolve_device("auto")[0]
    dtype = resolve_dtype(arguments.dtype, device)[0]
    transformers.utils.logging.disable_progress_bar()
    print(f"loading {arguments.model} in {dtype} on {device}", file=sys.stderr)
    target = LocalTarget.load(arguments.model, device, dtype)
    samples = _make_samples(arguments.tokens, target.facts.vocab_size)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    bare, stored = Rates(), Rates()
    num_bytes = 0
    _bare(target, samples, arguments.batch_tokens)  # the first pass pays for warming up
    for number in range(arguments.rounds):
        bare.add(num_tokens, _bare(target, samples, arguments.batch_tokens))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            seconds, num_bytes = _extract(work, target, samples, Path(folder), arguments)
        stored.add(num_tokens, seconds)
        print(
            f"round {number + 1}: bare {bare.wall[-1]:,.0f}, into the store {stored.wall[-1]:,.0f} tokens/s",
            file=sys.stderr,
        )
    ratio = max(stored.wall) / max(bare.wall)
    return {
        "name": NAME,
        "value": round(max(stored.wall), 1),
        "unit": "tokens/s",
        "baseline": round(max(bare.wall), 1),
        "ratio": round(ratio, 3),
        "details": {
            "baseline_is": "states after the final norm of the same batches, nothing kept",
            "limit": LIMIT,
            "within_limit": ratio >= LIMIT,
            "tokens": num_tokens,
            "samples": len(samples),
            "bytes": num_bytes,
            "dtype": dtype,
            "device": device,
            "model": arguments.model.name,
            "bare_tokens_per_second": [round(rate, 1) for rate in bare.wall],
            "extract_tokens_per_second": [round(rate, 1) for rate in stored.wall],
            "ratio_by_cpu_seconds": round(max(stored.cpu) / max(bare.cpu), 3),
        },
    }


def _set_threads(threads: int) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


def _make_samples(num_tokens: int, vocab_size: int) -> list[Any]:
    """Random tokens in lengths as chats have them; two thirds of each are an answer."""
    import numpy as np

    from eyas.store.samples import Sample, sample_id

    random = np.random.default_rng(0)
    samples: list[Sample] = []
    while sum(len(sample.tokens) for sample in samples) < num_tokens:
        length = int(np.clip(random.lognormal(5.3, 0.7), 24, 1024))
        tokens = random.integers(0, vocab_size, length).astype(np.int32)
        spans = ((length // 3, length),)
        name = f"random-{len(samples)}"
        samples.append(
            Sample(
                sample_id(tokens, spans), tokens, spans, name, "random", "random", "train", "stop", "given"
            )
        )
    return samples


def _bare(target: Any, samples: list[Any], batch_tokens: int) -> tuple[float, float]:
    """Seconds of the forward passes alone."""
    import torch

    from eyas.targets.batches import plan_batches

    batches = plan_batches([(s.id, len(s.tokens)) for s in samples], batch_tokens)
    started = _now()
    with torch.no_grad():
        for batch in batches:
            target.states(target.padded([samples[place].tokens.tolist() for place in batch]))
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return _since(started)


def _extract(
    work: Any, target: Any, samples: list[Any], folder: Path, arguments: argparse.Namespace
) -> tuple[tuple[float, float], int]:
    """Seconds and bytes of the stage's own loop into a new project."""
    from eyas.base.progress import SilentProgress
    from eyas.base.seal import sealed_folder
    from eyas.base.stop import StopFlag
    from eyas.stages.extract.left import find_left
    from eyas.stages.extract.pace import Pace
    from eyas.stages.extract.stage import capture_recipe
    from eyas.stages.project import Project
    from eyas.stages.protocol import RunContext
    from eyas.store.ledger import Ledger
    from eyas.store.samples import write_samples

    (folder / "eyas.toml").write_text(
        f'format = 1\n[target]\nmodel = "{arguments.model.resolve()}"\n'
        '[[data.sources]]\npath = "none.jsonl"\n[regenerate]\nenabled = false\n'
        f"[extract]\nbatch_tokens = {arguments.batch_tokens}\n"
    )
    project = Project.open(folder)
    with sealed_folder(project.layout.samples, {"num_samples": len(samples)}) as inside:
        write_samples(inside, samples)
    with Ledger.open(project.layout.ledger) as ledger:
        left = find_left(project.layout, ledger, arguments.batch_tokens, SilentProgress())
        items = work._read_items(project.layout, (name for batch in left.batches() for name in batch))
        recipe = capture_recipe(project, "benchmark", str(target.dtype).removeprefix("torch."))
        context = RunContext(ledger, SilentProgress(), StopFlag(), 1)
        started = _now()
        pace = Pace(None, 0, SilentProgress())
        num_bytes = work._capture_all(project, context, recipe, target, left, items, pace)
        seconds = _since(started)
        stored = ledger.counts()["stored"].samples
    if stored != len(samples):
        raise SystemExit(f"only {stored} of {len(samples)} samples were stored")
    return seconds, num_bytes
