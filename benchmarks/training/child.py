"""One contestant in a process of its own: ``python -m benchmarks.training.child NAME CASE``.

A line of input makes it do one step; it answers with a line of JSON. Torch gets its threads from the
environment.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path

from benchmarks.training.case import Case, forget_peak, peak_and_now

PEERS = Path(__file__).resolve().parents[2] / ".peers"
"""Where `make peers` installs them."""
MODULES = {
    "eyas": "ours",
    "plain": "plain",
    "product": "product",
    "SpecForge": "of_specforge",
    "speculators": "of_speculators",
}


def main() -> None:
    name, case = sys.argv[1], Case.from_json(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # packages may print
    if name == "reference":
        reference = import_module("benchmarks.training.plain").reference_sums(case)
        print(json.dumps(reference), file=answers, flush=True)
        return
    if name in ("SpecForge", "speculators"):
        sys.path.append(str(PEERS))
    kind = import_module(f"benchmarks.training.{MODULES[name]}").Contestant
    import_module("torch._dynamo")  # an optimizer imports it, most packages do so before
    imported = peak_and_now()[1]
    contestant = kind(case)
    forget_peak()
    said = {"version": kind.version, "shifted": kind.shifted, "objective": kind.objective}
    print(json.dumps(said), file=answers, flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        sums = contestant.step()
        answer = {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "sums": sums,
            "peak": peak_and_now()[0],
            "imported": imported,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
