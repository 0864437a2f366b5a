"""Accepted tokens per target forward of draft trees beside the chain of the same depth."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

NAME = "tree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", type=Path, required=True, help="a project that is trained")
    parser.add_argument("--set", action="append", default=[], help="override a value of its eyas.toml")
    parser.add_argument("--depth", type=int, default=3, help="drafts of the chain, depth of the trees")
    parser.add_argument("--top-k", type=int, default=4, help="children of a node")
    parser.add_argument("--total", default="3,8,16,32", help="drafts of a round, for each tree")
    parser.add_argument("--prompts", type=int, default=32, help="most prompts, spread over the file")
    parser.add_argument("--max-new-tokens", type=int, default=64)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Decode held-out first turns plainly, with the chain and with each tree; the baseline is the chain."""
    from benchmarks.serving.local_engine import LocalEngine

    from eyas.drafter.acceptance import AcceptanceCounts
    from eyas.drafter.speculate import Drafting
    from eyas.drafter.tree import TreeShape
    from eyas.stages.project import Project

    engine = LocalEngine.open(Project.open(arguments.project, tuple(arguments.set)), arguments.prompts)
    chain = engine.chain(arguments.depth)

    def answers(drafting: Drafting | None) -> tuple[list[list[int]], AcceptanceCounts, float]:
        started = time.perf_counter()
        found = engine.answers(drafting, arguments.max_new_tokens)
        counts = AcceptanceCounts.total((a.counts for a in found), drafting.depth if drafting else 0)
        return [a.tokens for a in found], counts, time.perf_counter() - started

    plain, _, plain_seconds = answers(None)
    ways = {"chain": chain}
    for total in (int(word) for word in arguments.total.split(",")):
        ways[f"tree of {total}"] = replace(chain, tree=TreeShape(arguments.depth, arguments.top_k, total))
    rows: dict[str, dict[str, Any]] = {}
    lengths: dict[str, float] = {}
    for name, drafting in ways.items():
        texts, counts, seconds = answers(drafting)
        lengths[name] = round(counts.acceptance_length, 4)
        rows[name] = {
            "acceptance_length": lengths[name],
            "unconditional_rates": [round(rate, 4) for rate in counts.unconditional_rates],
            "equal_texts": sum(one == other for one, other in zip(plain, texts, strict=True)),
            "seconds": round(seconds, 2),
        }
        print(f"{name}: {rows[name]}", file=sys.stderr)
    best = max((name for name in rows if name != "chain"), key=lengths.__getitem__)
    value, baseline = lengths[best], lengths["chain"]
    return {
        "name": NAME,
        "value": value,
        "unit": "tokens per target forward",
        "baseline": baseline,
        "ratio": round(value / baseline, 4),
        "details": {
            "baseline_is": f"the chain of {arguments.depth}, same prompts, same drafter",
            "best": best,
            "tree_is_not_below_chain": value >= baseline,
            "depth": arguments.depth,
            "top_k": arguments.top_k,
            "prompts": len(engine.prompts),
            "tokens": sum(map(len, plain)),
            "plain_seconds": round(plain_seconds, 2),
            "ways": rows,
        },
    }
