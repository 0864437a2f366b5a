"""Training rate of two processes on one machine, beside one process with one of the cores.

Three ways take turns, each process with one thread: one process; two that train together, each step's
batches dealt out to them; and two that train for themselves, side by side. What the last lose is the
machine's (memory and clock are shared); what the second lose beyond that is the exchange, the update that
both do, and waiting for each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.append import write_store
from benchmarks.training.case import Case
from benchmarks.training.compare import EQUAL, add_sizes, case_of
from benchmarks.training.stored import make_samples
from benchmarks.training.turns import Child

from eyas.stages.train.meeting import Board

WANTED = 0.9
_MODULE = "benchmarks.training.rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, kind: type, default: Any, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, help=text)

    add("--rounds", int, 2, "runs of each way, in turn; the best counts")
    add("--samples", int, 120, "samples in the store, 128 to 384 tokens each")
    add("--batch-tokens", int, 2048, "as train.batch_tokens")
    add("--accumulate", int, 2, "as train.accumulate: batches of a step, in all processes together")
    add("--folder", Path, None, "where the store is written")
    parser.add_argument("--sharding", choices=("ddp", "fsdp"), default="ddp", help="as train.sharding")
    add_sizes(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The trainer itself in each way, on a real store of random states."""
    case = case_of(arguments)
    found: dict[str, list[list[dict[str, Any]]]] = {"one": [], "two together": [], "two apart": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        # longest sample: room for its positions
        case = replace(case, length=max(case.length, 384))
        write_store(folder, make_samples(case, arguments.samples))
        board = Board.of_this_machine()
        for number in range(arguments.rounds):
            for way, runs in found.items():
                place = folder / f"{way}-{number}"
                together = way == "two together"
                count = 1 if way == "one" else 2
                briefs = [
                    {
                        "case": asdict(case),
                        "store": str(folder),
                        "place": str(place / str(rank)),
                        "batch_tokens": arguments.batch_tokens,
                        "accumulate": arguments.accumulate,
                        "sharding": arguments.sharding,
                        "rank": rank if together else 0,
                        "size": 2 if together else 1,
                        "port": board.port,
                        "meeting": f"ranks-{number}",
                    }
                    for rank in range(count)
                ]
                runs.append(_run(way, briefs))
            rates = ", ".join(f"{way} {_rate(runs[-1]):.0f}" for way, runs in found.items())
            print(f"round {number + 1} of {arguments.rounds}: tokens/s for a core: {rates}", file=sys.stderr)
    return _record(case, arguments, found)


def _run(way: str, briefs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Start processes, let them begin together, and hear what each took."""
    children = [Child(way, [json.dumps(brief)], 1, module=_MODULE) for brief in briefs]
    try:
        for child in children:
            child.answer()
        for child in children:
            child.tell()
        return [child.answer() for child in children]
    finally:
        for child in children:
            child.close()


def _rate(answers: list[dict[str, Any]]) -> float:
    """Tokens a second for each core."""
    own = [float(answer["tokens"] / answer["seconds"]) for answer in answers if "tokens" in answer]
    return sum(own) / len(answers)


def _record(
    case: Case, arguments: argparse.Namespace, found: dict[str, list[list[dict[str, Any]]]]
) -> dict[str, Any]:
    rates = {way: max(map(_rate, runs)) for way, runs in found.items()}
    losses = {way: runs[0][0]["losses"] for way, runs in found.items()}
    pairs = zip(losses["one"], losses["two together"], strict=True)
    apart = max(abs(a - b) / abs(a) for a, b in pairs)
    steps = len(losses["one"])
    cpu = {
        way: min(sum(answer["cpu"] for answer in runs) for runs in all_runs)
        for way, all_runs in found.items()
    }
    return {
        "name": "ranks",
        "value": round(rates["two together"], 1),
        "unit": "tokens/s for a core",
        "baseline": round(rates["one"], 1),
        "ratio": round(rates["two together"] / rates["one"], 3),
        "details": {
            "baseline_is": "one process with one thread",
            "wanted": WANTED,
            "of_two_apart": round(rates["two together"] / rates["two apart"], 3),
            "two_apart": round(rates["two apart"] / rates["one"], 3),
            "cpu_seconds": {way: round(seconds, 2) for way, seconds in cpu.items()},
            "tokens_of_each": {
                way: [answer["own_tokens"] for answer in runs[0]] for way, runs in found.items()
            },
            "equal_loss": apart <= EQUAL[case.dtype],
            "losses_apart": float(f"{apart:.1e}"),
            "sharding": arguments.sharding,
            "steps": steps,
            "case": asdict(case),
        },
    }
