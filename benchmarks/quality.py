"""Acceptance length on public prompts of a drafter that is trained on the target's own answers to others."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAME = "quality"
WANTED = 2.1
REPOSITORY = Path(__file__).resolve().parents[1]

_PROJECT = """format = 1
[target]
model = {model}
[data]
max_seq_len = 1024
validation = 0.02
[[data.sources]]
path = {answers}
[regenerate]
enabled = false
[drafter]
norms = "eagle3.1"
[train]
batch_tokens = 512
steps = 3
lr = 4e-4
validations = 8
[evaluate]
prompts = {held_out}
num_drafts = 3
max_new_tokens = 128
batch_size = 16
timing_prompts = 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--answers", type=Path, required=True, help="JSONL of the target's own answers")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL of prompts to measure on")
    parser.add_argument("--project", type=Path, default=None, help="keep the project here; goes on if there")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to eyas run"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Extract, train and evaluate; the value is the mean of the domains, the baseline what is wanted."""
    with tempfile.TemporaryDirectory() as folder:
        project = arguments.project or Path(folder) / "quality"
        project.mkdir(parents=True, exist_ok=True)
        if not (project / "eyas.toml").exists():
            named = {
                "model": arguments.model, "answers": arguments.answers, "held_out": arguments.held_out
            }  # fmt: skip
            text = _PROJECT.format(**{name: json.dumps(str(path.resolve())) for name, path in named.items()})
            (project / "eyas.toml").write_text(text)
        command = [sys.executable, "-m", "eyas", "run", "--until", "evaluate", "--project", str(project)]
        command += [word for override in arguments.set for word in ("--set", override)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        started = time.perf_counter()
        done = subprocess.run(command, stdout=sys.stderr, env=environment, check=False)
        if done.returncode not in (0, 3):
            raise SystemExit(f"eyas run ended with exit code {done.returncode}")
        minutes = (time.perf_counter() - started) / 60
        report = json.loads((project / "reports" / "evaluation.json").read_text())
        stats = json.loads((project / "data" / "stats.json").read_text())
        lines = (project / "drafter" / "metrics.jsonl").read_text().splitlines()
    curve = _curve([json.loads(line) for line in lines])
    domains = {name: row["acceptance_length"] for name, row in report["domains"].items()}
    value = sum(domains.values()) / len(domains)
    return {
        "name": NAME,
        "value": round(value, 4),
        "unit": "tokens per target forward, mean of the domains",
        "baseline": WANTED,
        "ratio": round(value / WANTED, 4),
        "details": {
            "baseline_is": "what is wanted",
            "domains": {name: round(length, 4) for name, length in domains.items()},
            "all_rounds": round(report["acceptance_length"], 4),
            "num_drafts": report["num_drafts"],
            "num_answers": report["num_answers"],
            "lossless": {k: v for k, v in report["lossless"].items() if k != "differences"},
            "supervised_tokens": stats["supervised_tokens"],
            "minutes_of_this_run": round(minutes, 2),
            "curve": curve,
        },
    }


def _curve(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance length of the walk along validation answers, by training tokens and minutes of training."""
    curve, tokens, seconds = [], 0, 0.0
    for row in rows:
        if row["kind"] == "train":
            seconds += (row["tokens"] - tokens) / row["tokens_per_second"]
            tokens = row["tokens"]
        elif row["kind"] == "validation":
            minutes = float(f"{seconds / 60:.4g}")
            curve.append({"tokens": tokens, "minutes": minutes, "walk_tau": round(row["walk_tau"], 4)})
    return curve
