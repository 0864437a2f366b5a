"""Speed-up of a drafter in a real server at one request, and the best number of drafts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.speed import Side, compared, in_turns

NAME = "served-speed"
WANTED = 1.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", type=Path, help="an exported project, whose servers are started here")
    parser.add_argument("--set", action="append", default=[], help="override a value of its eyas.toml")
    parser.add_argument("--drafts", default="1,2,3", help="lengths of the chain, with --project")
    parser.add_argument("--url", help="instead: a running server with the drafter")
    parser.add_argument("--plain-url", help="and one of the same target without it")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts that prepare reads")
    parser.add_argument("--limit", type=int, default=64, help="most prompts")
    parser.add_argument("--rounds", type=int, default=4, help="parts of the prompts, asked in turn")
    parser.add_argument("--max-tokens", type=int, default=128)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask both servers one prompt at a time, in turn; the baseline is the plain one beside the best chain."""
    from eyas.targets.bench.prompts import read_prompts

    if (arguments.project is None) == (arguments.url is None or arguments.plain_url is None):
        raise SystemExit("give --project DIR, or both --url and --plain-url")
    prompts = read_prompts([arguments.prompts], limit=arguments.limit)
    if arguments.project is not None:
        details = _of_project(arguments, prompts)
    else:
        details = _of_running(arguments, prompts)
    chains: dict[str, dict[str, Any]] = details["chains"]
    best = max(chains, key=lambda name: chains[name]["speedup"])
    return {
        "name": NAME,
        "value": chains[best]["tokens_per_second"],
        "unit": "tokens/s",
        "baseline": chains[best]["plain_tokens_per_second"],
        "ratio": chains[best]["speedup"],
        "details": {
            "baseline_is": "the same kind of server without a drafter, one request at a time, in turn",
            "wanted": WANTED,
            "best_num_drafts": int(best),
            "prompts": len(prompts),
            "max_tokens": arguments.max_tokens,
            **details,
        },
    }


def _of_running(arguments: argparse.Namespace, prompts: list[Any]) -> dict[str, Any]:
    from eyas.targets.bench.server import look_at
    from eyas.targets.serving.address import Address

    drafted, plain = (Side(look_at(Address(url.rstrip("/")))) for url in (arguments.url, arguments.plain_url))
    in_turns(drafted, plain, prompts, arguments.rounds, arguments.max_tokens, _say)
    return {"chains": {str(drafted.look.num_drafts or 0): compared(drafted, plain)}}


def _of_project(arguments: argparse.Namespace, prompts: list[Any]) -> dict[str, Any]:
    """One plain server throughout, and beside it one with the drafter for each length of the chain."""
    from eyas.stages.project import Project
    from eyas.targets.serving.manager import Servers

    overrides = tuple(arguments.set)
    project = Project.open(arguments.project, overrides)
    root, logs = project.layout.root, project.layout.root / "logs"
    drafter = project.layout.exports / project.config.export.name
    found: dict[str, Any] = {}
    with Servers.open(project.config, root, "generate", log_folder=logs, say=_say) as others:
        for chain in (int(word) for word in arguments.drafts.split(",")):
            one = Project.open(arguments.project, (*overrides, f"evaluate.num_drafts={chain}"))
            with Servers.open(
                one.config, root, "draft", log_folder=logs, drafter=drafter, say=_say
            ) as served:
                drafted, plain = (_side(servers.servers[0]) for servers in (served, others))
                in_turns(drafted, plain, prompts, arguments.rounds, arguments.max_tokens, _say)
                found[str(chain)] = compared(drafted, plain)
            _say(f"chain of {chain}: {found[str(chain)]}")
    return {"dtype": project.config.target.dtype, "model": project.resolved.model.name, "chains": found}


def _side(server: Any) -> Side:
    from eyas.targets.bench.server import look_at

    return Side(look_at(server.address, server.model), server.pid)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
