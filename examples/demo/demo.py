"""The demo: prepare the target, run the pipeline in demo/, show what came out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from target import make_target

from eyas.base.files import tree_bytes
from eyas.base.units import format_bytes, format_count
from eyas.cli.output import NO_NEXT_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = REPOSITORY / "demo"


def main() -> int:
    """Run or resume the demo; returns the exit code of ``eyas run``."""
    make_target(REPOSITORY / ".models" / "smollm2-135m-instruct")
    PROJECT.mkdir(exist_ok=True)
    if not (PROJECT / "eyas.toml").exists():
        shutil.copyfile(Path(__file__).with_name("eyas.toml"), PROJECT / "eyas.toml")
    command = [sys.executable, "-m", "eyas", "run", "--project", str(PROJECT)]
    child = subprocess.Popen(command, env={**os.environ, NO_NEXT_VARIABLE: "1"})
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:  # the terminal sends it to the child too, which saves its state
            continue
    if code == 0:
        show()
    elif code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        print("\nnext: make demo", file=sys.stderr)
    return code


def show() -> None:
    """Print the table of results and the next command."""
    report = json.loads((PROJECT / "reports" / "evaluation.json").read_text())
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\nAcceptance length, chain of {report['num_drafts']}, greedy, held-out prompts")
    table = Table(box=SIMPLE_HEAD)
    for column in ("domain", "prompts", "acceptance length"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for domain, row in sorted(report["domains"].items()):
        table.add_row(domain, format_count(row["num_prompts"]), f"{row['acceptance_length']:.3f}")
    table.add_section()
    table.add_row("all", format_count(report["num_prompts"]), f"{report['acceptance_length']:.3f}")
    console.print(table)
    predicted = report["prediction"]
    if predicted:
        lengths = {row["num_drafts"]: row for row in predicted["rows"]}
        told = ", ".join(f"{k}: {lengths[k]['acceptance_length']:.2f}" for k in (1, 2, 3, 5, 8))
        console.print(
            f"predicted from stored states, {predicted['conversations']} conversations, by drafts: {told}"
        )
    speed, equal = report["speed"], report["lossless"]
    console.print(
        f"tokens/s, one prompt at a time: {speed['plain_tokens_per_second']:.1f} without the drafter, "
        f"{speed['drafted_tokens_per_second']:.1f} with it ({speed['ratio']:.2f}x)"
    )
    console.print(
        f"text equal to plain decoding: {equal['equal']} of {equal['num_prompts']} prompts, "
        f"{equal['ties']} numeric ties, {equal['different']} different"
    )
    export = PROJECT / "exports" / "eagle3"
    name, target = export.relative_to(REPOSITORY), ".models/smollm2-135m-instruct"
    sizes = [format_bytes(tree_bytes(folder)) for folder in (PROJECT, export)]
    console.print(f"size on disk: {sizes[0]}, of which the export {sizes[1]}")
    console.print(f"export: {name}")
    console.print(f"\nnext: .venv/bin/eyas inspect {name} --target {target}")


if __name__ == "__main__":
    sys.exit(main())
