"""Speed-up of a drafter in a running server, and the best number of drafts by cost and acceptance."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

NAME = "served-speed"


class _Telling:
    """Progress as lines on stderr."""

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        print(f"{label}: {total} {unit}", file=sys.stderr)

    def advance(self, units: int, **facts: float | int | str) -> None:
        pass

    def say(self, message: str) -> None:
        print(message, file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the server with the drafter")
    parser.add_argument("--plain-url", required=True, help="a server of the same target without one")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts that prepare reads")
    parser.add_argument("--concurrency", default="1", help="requests in flight, as 1,4")
    parser.add_argument("--limit", type=int, default=64, help="most prompts")
    parser.add_argument("--max-tokens", type=int, default=128)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both servers in turn, as ``eyas bench`` does; the baseline is the plain one."""
    from eyas.targets.bench.prompts import read_prompts
    from eyas.targets.bench.run import run_bench
    from eyas.targets.bench.server import look_at
    from eyas.targets.serving.address import Address

    levels = sorted({int(word) for word in arguments.concurrency.split(",")})
    found = run_bench(
        look_at(Address(arguments.url.rstrip("/"))),
        look_at(Address(arguments.plain_url.rstrip("/"))),
        read_prompts([arguments.prompts], limit=arguments.limit),
        levels,
        max_tokens=arguments.max_tokens,
        temperature=0.0,
        seed=0,
        progress=_Telling(),
    )
    first = found.levels[0]
    assert first.plain is not None
    return {
        "name": NAME,
        "value": round(first.drafted.tokens_per_second, 3),
        "unit": "tokens/s",
        "baseline": round(first.plain.tokens_per_second, 3),
        "ratio": round(first.drafted.tokens_per_second / first.plain.tokens_per_second, 4),
        "details": {
            "baseline_is": f"the same server without a drafter, {first.concurrency} in flight",
            "wanted": 1.3,
            "best_num_drafts": {
                str(level.concurrency): level.advice.best.num_drafts if level.advice else None
                for level in found.levels
            },
            **found.as_dict(),
        },
    }
