"""Acceptance length of an exported drafter in vLLM beside the one that evaluate measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.acceptance import served_acceptance

LIMIT = 0.03
"""Largest share by which the two may differ."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--project", type=Path, required=True, help="a project that is exported and evaluated"
    )
    parser.add_argument("--set", action="append", default=[], help="override a value of its eyas.toml")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve the export, ask the prompts of evaluate, and read the server's own counts."""
    found = served_acceptance(
        arguments.project, tuple(arguments.set), lambda line: print(line, file=sys.stderr)
    )
    return {
        "name": "served-acceptance",
        "value": round(found.served, 4),
        "unit": "tokens per target forward",
        "baseline": round(found.evaluated, 4),
        "ratio": round(found.served / found.evaluated, 4),
        "details": {
            "baseline_is": "reports/evaluation.json, the same prompts, decoded in eyas",
            "limit": LIMIT,
            "within_limit": abs(found.served / found.evaluated - 1) <= LIMIT,
            "answers": found.num_answers,
            "rounds": found.rounds,
            "equal_texts": found.equal,
            "ties": found.ties,
            "different": found.different,
            "dtype": found.dtype,
        },
    }
