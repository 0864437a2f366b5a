"""CPU seconds of training until held-out answers reach an acceptance length, beside the peers' recipes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.training.child import PEERS
from benchmarks.training.compare import REAL_PEERS
from benchmarks.training.turns import Child, ChildFailed

REPOSITORY = Path(__file__).resolve().parents[1]
WANTED = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--project", type=Path, default=REPOSITORY / "demo", help="a project that was trained"
    )
    parser.add_argument("--length", type=float, default=1.5, help="acceptance length to be reached")
    parser.add_argument("--every", type=float, default=15.0, help="CPU seconds between measurements")
    parser.add_argument("--limit", type=float, default=900.0, help="most CPU seconds of training for each")
    parser.add_argument("--epochs", type=int, default=20, help="passes that the peers plan for")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--against", nargs="*", default=[*REAL_PEERS], help="of SpecForge, speculators")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One learns after the other, until it is there or at the limit, measured after each slice of time.

    Where no peer gets there, the ratio is a lower bound: what the better one spent, over what eyas needed.
    """
    names = ["eyas", *(peer for peer in arguments.against if PEERS.is_dir())]
    project = str(arguments.project.resolve())
    curves, failed = dict[str, list[dict[str, Any]]](), dict[str, str]()
    for name in names:
        try:
            curves[name] = _curve(name, project, arguments)
        except ChildFailed as error:
            failed[name] = str(error)
    if "eyas" not in curves or len(curves) == 1:
        raise SystemExit(f"nothing to compare: {failed or 'make peers'}")
    reached = {name: _reached(curve, arguments.length) for name, curve in curves.items()}
    if reached["eyas"] is None:
        best = max(point["length"] for point in curves["eyas"])
        raise SystemExit(f"eyas came to {best:.3f} only: lower --length or raise --limit")
    peers = [name for name in curves if name != "eyas"]
    there = [name for name in peers if reached[name] is not None]
    spent = {name: reached[name] or curves[name][-1]["cpu"] for name in peers}
    better = min(there or peers, key=lambda name: (spent[name], name))
    if not there:
        better = max(peers, key=lambda name: max(point["length"] for point in curves[name]))
    bound = "" if there else ", which did not get there: a lower bound"
    return {
        "name": "time-to-acceptance",
        "value": round(reached["eyas"], 2),
        "unit": "CPU s",
        "baseline": round(spent[better], 2),
        "ratio": round(spent[better] / reached["eyas"], 3),
        "details": {
            "baseline_is": f"the recipe of {better}{bound}",
            "length": arguments.length,
            "wanted": WANTED,
            "threads": arguments.threads,
            "reached": {name: value and round(value, 2) for name, value in reached.items()},
            "curves": {name: [_told(point) for point in curve] for name, curve in curves.items()},
            "not_run": failed,
        },
    }


def _told(point: dict[str, Any]) -> list[float]:
    """CPU seconds, tokens, acceptance length."""
    return [round(point["cpu"], 1), point["tokens"], round(point["length"], 4)]


def _curve(name: str, project: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    words = [project, str(arguments.epochs)]
    child = Child(name, words, arguments.threads, module="benchmarks.training.learn")
    try:
        child.answer()
        points = [child.ask("0")]
        while not points[-1]["ended"] and points[-1]["cpu"] < arguments.limit:
            points.append(child.ask(str(arguments.every)))
            last = points[-1]
            print(
                f"{name}: {last['cpu']:.0f} CPU s, {last['tokens']} tokens, {last['length']:.3f}",
                file=sys.stderr,
            )
            if last["length"] >= arguments.length:
                break
    finally:
        child.close()
    return points


def _reached(curve: list[dict[str, Any]], length: float) -> float | None:
    """CPU seconds at which a curve crosses the length, in a line between two measurements."""
    for before, after in zip([None, *curve], curve, strict=False):
        if after["length"] >= length:
            if before is None:
                return float(after["cpu"])
            share = (length - before["length"]) / (after["length"] - before["length"])
            return float(before["cpu"] + share * (after["cpu"] - before["cpu"]))
    return None
