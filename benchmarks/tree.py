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
    import torch

    from eyas.drafter.acceptance import AcceptanceCounts
    from eyas.drafter.speculate import DecodeSettings, Drafting, decode
    from eyas.drafter.tree import TreeShape
    from eyas.stages.chat_tools import load_renderer
    from eyas.stages.evaluate.prompts import held_out_conversations
    from eyas.stages.project import Project
    from eyas.stages.trained import load_trained
    from eyas.targets.local.model import LocalTarget
    from eyas.targets.parts import load_parts

    project = Project.open(arguments.project, tuple(arguments.set))
    trained, renderer = load_trained(project), load_renderer(project)
    held_out = held_out_conversations(project, renderer)
    chosen = held_out[:: max(1, len(held_out) // arguments.prompts)][: arguments.prompts]
    prompts = [prompt for one in chosen if (prompt := one.next_prompt()) is not None]
    target = LocalTarget.load(project.resolved.model, "cpu", "float32")
    embedding = load_parts(project.resolved.model, "cpu", target.dtype).embedding
    chain = Drafting(
        trained.drafter(embedding, target.dtype),
        torch.from_numpy(trained.vocabulary.target_ids),
        project.resolved.aux_layers,
        arguments.depth,
    )
    settings = DecodeSettings(arguments.max_new_tokens, frozenset(renderer.end_tokens))

    def answers(drafting: Drafting | None) -> tuple[list[list[int]], AcceptanceCounts, float]:
        found: list[list[int]] = []
        counts: list[AcceptanceCounts] = []
        started = time.perf_counter()
        for start in range(0, len(prompts), 8):
            group = prompts[start : start + 8]
            for answer in decode(target.session(len(group)), group, settings, drafting):
                found.append(answer.tokens)
                counts.append(answer.counts)
        depth = drafting.depth if drafting else 0
        return found, AcceptanceCounts.total(counts, depth), time.perf_counter() - started

    plain, _, plain_seconds = answers(None)
    ways = {"chain": chain}
    for total in (int(word) for word in arguments.total.split(",")):
        ways[f"tree of {total}"] = replace(chain, tree=TreeShape(arguments.depth, arguments.top_k, total))
    rows: dict[str, dict[str, Any]] = {}
    for name, drafting in ways.items():
        texts, counts, seconds = answers(drafting)
        rows[name] = {
            "acceptance_length": round(counts.acceptance_length, 4),
            "unconditional_rates": [round(rate, 4) for rate in counts.unconditional_rates],
            "equal_texts": sum(one == other for one, other in zip(plain, texts, strict=True)),
            "seconds": round(seconds, 2),
        }
        print(f"{name}: {rows[name]}", file=sys.stderr)
    lengths = {name: float(row["acceptance_length"]) for name, row in rows.items()}
    best = max((name for name in lengths if name != "chain"), key=lambda name: lengths[name])
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
            "prompts": len(prompts),
            "tokens": sum(map(len, plain)),
            "plain_seconds": round(plain_seconds, 2),
            "ways": rows,
        },
    }
