"""Share of the machine's own matrix rate that a training step reaches on the arithmetic it needs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.training.arithmetic import needed
from benchmarks.training.compare import add_sizes, case_of
from benchmarks.training.turns import take_turns

WANTED = 0.75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8, help="steps and products in turn; the best counts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    add_sizes(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """A step and a large square product take turns; both by CPU seconds.

    The machine's own rate is that of the product, in the arithmetic of the step.
    """
    case = case_of(arguments)
    counted = needed(case)
    total = sum(counted.values())
    measured, failed = take_turns(["eyas", "product"], case, arguments.threads, arguments.rounds)
    if failed:
        raise SystemExit("; ".join(failed.values()))
    seconds = min(measured["eyas"].cpu)
    operations = measured["product"].sums[-1][0]
    own_rate = operations / min(measured["product"].cpu)
    rate = total / seconds
    for part, count in counted.items():
        print(f"{part:40} {count / 1e9:8.2f} GFLOP", file=sys.stderr)
    return {
        "name": "matrix-rate",
        "value": round(rate / 1e9, 2),
        "unit": "GFLOP/CPU s",
        "baseline": round(own_rate / 1e9, 2),
        # digits that count, since a tiny case reaches a tiny share
        "ratio": float(f"{rate / own_rate:.4g}"),
        "details": {
            "baseline_is": f"a square product of torch in {case.dtype}, {arguments.threads} thread(s)",
            "wanted": WANTED,
            "needed_gflop": round(total / 1e9, 2),
            "needed_gflop_by_part": {part: round(count / 1e9, 2) for part, count in counted.items()},
            "step_cpu_seconds": round(seconds, 4),
            "least_cpu_seconds": round(total / own_rate, 4),
        },
    }
