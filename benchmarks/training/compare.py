"""A training step beside the peers' steps: CPU seconds, memory, and whether all reach the same loss."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.training.case import Case
from benchmarks.training.child import PEERS
from benchmarks.training.turns import Measured, reference, take_turns

REAL_PEERS = ("SpecForge", "speculators")
SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "drafts", "length", "steps")
EQUAL = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of loss sums that counts as equal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, kind: type, default: Any, text: str, **more: Any) -> None:
        parser.add_argument(name, type=kind, default=default, help=text, **more)

    add("--rounds", int, 6, "steps of each, in turn; the best counts")
    add("--threads", int, [1, 2], "runs with so many CPU threads", nargs="+")
    add("--against", str, [*REAL_PEERS, "plain"], "of SpecForge, speculators, plain", nargs="*")
    add_sizes(parser)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options for the sizes of a case."""
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, or auto: as the processor likes")
    for name in SIZES:
        default = getattr(Case(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"now {default}")


def case_of(arguments: argparse.Namespace) -> Case:
    """The sizes that were asked for."""
    from eyas.targets.dtype import resolve_dtype

    sizes = {name: getattr(arguments, name) for name in SIZES}
    return Case(**sizes, dtype=resolve_dtype(arguments.dtype, "cpu")[0])


def compare(name: str, case: Case, arguments: argparse.Namespace, *, wanted: float) -> dict[str, Any]:
    """The benchmark's record. The ratio is the smallest of all thread counts, against the better real peer.

    Where no real peer is installed, or none runs, the baseline is the plain step, and the record says so.
    """
    names = ["eyas", *(peer for peer in arguments.against if peer == "plain" or PEERS.is_dir())]
    missing = [peer for peer in arguments.against if peer not in names]
    if missing:
        print(f"not installed: {', '.join(missing)} (make peers)", file=sys.stderr)
    expected = reference(replace(case, dtype="float32"))
    by_threads, failed = {}, dict.fromkeys(missing, "not installed: make peers")
    for threads in arguments.threads:
        measured, not_run = take_turns(names, case, threads, arguments.rounds)
        failed.update(not_run)
        by_threads[threads] = _table(case, measured, expected)
    ratios = {threads: _against_better(table) for threads, table in by_threads.items()}
    threads = min(ratios, key=lambda count: ratios[count]["ratio"])
    worst, table = ratios[threads], by_threads[threads]
    baseline = table[worst["peer"]]
    return {
        "name": name,
        "value": table["eyas"]["cpu_seconds"],
        "unit": "CPU s/step",
        "baseline": baseline["cpu_seconds"],
        "ratio": worst["ratio"],
        "details": {
            "baseline_is": f"{worst['peer']} {baseline['version']}, the better peer, {threads} thread(s)",
            "wanted": wanted,
            "memory_wanted": 0.65,
            "by_threads": {count: ratios[count] | {"of": by_threads[count]} for count in by_threads},
            "equal_loss": all(row["equal"] for table in by_threads.values() for row in table.values()),
            "not_run": failed,
            "case": {**asdict(case), "supervised": len(case.rows(0, shifted=False))},
        },
    }


def _table(
    case: Case, measured: dict[str, Measured], expected: dict[str, dict[str, list[float]]]
) -> dict[str, dict[str, Any]]:
    table = {}
    for name, of in measured.items():
        wanted = expected[of.objective]["shifted" if of.shifted else "span"]
        first, last = of.sums[0], of.sums[-1]
        apart = max(abs(a - b) / abs(b) for a, b in zip(first, wanted, strict=True))
        best = min(of.cpu)
        supervised = sum(len(case.rows(step, shifted=of.shifted)) for step in range(case.steps))
        table[name] = {
            "version": of.version,
            "cpu_seconds": round(best, 4),
            "wall_seconds": round(min(of.wall), 4),
            "tokens_per_cpu_second": round(case.length / best, 1),
            "supervised_rows_per_cpu_second": round(supervised / best, 1),
            "peak_mb": round(of.peak / 1e6),
            "peak_above_imports_mb": round((of.peak - of.imported) / 1e6),
            "rows": "shifted" if of.shifted else "span",
            "objective": of.objective,
            "apart_from_float64": float(f"{apart:.1e}"),
            "equal": apart <= EQUAL[case.dtype],
            # a teacher's entropy is a constant: taken out, all are measured in the same nats
            "loss_first_and_last": [round(_loss(case, of, expected, sums), 5) for sums in (first, last)],
        }
    return table


def _loss(case: Case, of: Measured, expected: dict[str, dict[str, list[float]]], sums: list[float]) -> float:
    """Weighted mean loss as soft cross-entropy, whatever the contestant's own objective is."""
    rows = "shifted" if of.shifted else "span"
    total = 0.0
    for step, value in enumerate(sums):
        entropy = expected["soft_ce"][rows][step] - expected["kl"][rows][step]
        plain = value + entropy if of.objective == "kl" else value
        total += case.gamma**step * plain / len(case.rows(step, shifted=of.shifted))
    return total


def _against_better(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    peers = [name for name in table if name in REAL_PEERS] or [name for name in table if name != "eyas"]
    if not peers:
        raise SystemExit("nothing to compare with: make peers, or --against plain")
    better = min(peers, key=lambda name: table[name]["cpu_seconds"])
    leaner = min(peers, key=lambda name: table[name]["peak_above_imports_mb"])
    ours = table["eyas"]
    return {
        "peer": better,
        "ratio": round(table[better]["cpu_seconds"] / ours["cpu_seconds"], 3),
        "ratio_by_wall": round(table[better]["wall_seconds"] / ours["wall_seconds"], 3),
        "memory_of_peer": round(ours["peak_above_imports_mb"] / table[leaner]["peak_above_imports_mb"], 3),
        "process_memory_of_peer": round(ours["peak_mb"] / min(table[name]["peak_mb"] for name in peers), 3),
    }
