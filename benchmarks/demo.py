"""The demo from the first prompt to the export, timed, in a project of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAME = "demo"

REPOSITORY = Path(__file__).resolve().parents[1]
LIMITS = {"acceptance_length": 1.6, "minutes": 15.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = REPOSITORY / ".models" / "smollm2-135m-instruct"
    parser.add_argument(
        "--model", type=Path, default=default, help="folder of the target; `make demo` makes it"
    )
    parser.add_argument("--project", type=Path, default=None, help="keep the project here; must not exist")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to eyas run"
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Run it and read its report; the baseline is plain decoding, one token per target forward."""
    if not (arguments.model / "config.json").is_file():
        raise SystemExit(f"there is no target in {arguments.model}: make demo, or give --model FOLDER")
    with tempfile.TemporaryDirectory() as folder:
        project = arguments.project or Path(folder) / "demo"
        project.mkdir(parents=True)
        text = (REPOSITORY / "examples" / "demo" / "eyas.toml").read_text()
        (project / "eyas.toml").write_text(text.replace('"../', f'"{REPOSITORY}/'))
        command = [sys.executable, "-m", "eyas", "run", "--project", str(project)]
        command += ["--set", f"target.model={arguments.model.resolve()}"]
        for override in arguments.set:
            command += ["--set", override]
        started = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        done = subprocess.run(command, stdout=sys.stderr, env=environment, check=False)
        minutes = (time.perf_counter() - started) / 60
        if done.returncode not in (0, 3):
            raise SystemExit(f"eyas run ended with exit code {done.returncode}")
        report = json.loads((project / "reports" / "evaluation.json").read_text())
    length = float(report["acceptance_length"])
    return {
        "name": NAME,
        "value": round(length, 4),
        "unit": "tokens per target forward",
        "baseline": 1.0,
        "ratio": round(length, 4),
        "details": {
            "baseline_is": "plain decoding: one token per target forward",
            "minutes": round(minutes, 2),
            "limits": LIMITS,
            "within_limits": length >= LIMITS["acceptance_length"] and minutes <= LIMITS["minutes"],
            "num_drafts": report["num_drafts"],
            "num_prompts": report["num_prompts"],
            "domains": {name: row["acceptance_length"] for name, row in report["domains"].items()},
            "lossless": {k: v for k, v in report["lossless"].items() if k != "differences"},
            "speed": report["speed"],
            "set_aside": done.returncode == 3,
        },
    }
