"""Seconds of a dashboard page and of the status behind it on a project of many samples."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

NAME = "dashboard"

LIMIT_SECONDS = 0.15
SOURCE = Path(__file__).resolve().parents[1] / "src"
PATHS = ("/", "/api/status", "/api/parts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=100_000, help="samples in the project")
    parser.add_argument(
        "--events", type=int, default=20_000, help="beats in the log, a day of them is 17,000"
    )
    parser.add_argument("--steps", type=int, default=20_000, help="training steps in the metrics")
    parser.add_argument("--repeats", type=int, default=20, help="requests of each page")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Each request comes after the view has aged, so that all of the work is in it."""
    with tempfile.TemporaryDirectory() as folder:
        root = make_project(Path(folder) / "project", arguments)
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas", "dashboard", "--project", str(root), "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
            },
        )
        try:
            assert process.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                text += process.stdout.readline()
            url = json.loads(text)["url"]
            seconds, cpu = {}, {}
            for path in PATHS:
                before = _cpu_seconds(process.pid)
                seconds[path] = _times(url, path, arguments.repeats)
                cpu[path] = (_cpu_seconds(process.pid) - before) / arguments.repeats
        finally:
            process.terminate()
            process.wait()
    medians = {path: statistics.median(times) for path, times in seconds.items()}
    return {
        "name": NAME,
        "value": round(medians["/"], 4),
        "unit": "s",
        "baseline": LIMIT_SECONDS,
        "ratio": round(medians["/"] / LIMIT_SECONDS, 3),
        "details": {
            "baseline_is": "the limit",
            "samples": arguments.samples,
            "median_seconds": {path: round(value, 4) for path, value in medians.items()},
            "best_seconds": {path: round(min(times), 4) for path, times in seconds.items()},
            "cpu_seconds": {path: round(value, 4) for path, value in cpu.items()},
            "first_seconds": round(seconds["/"][0], 4),
        },
    }


def _cpu_seconds(pid: int) -> float:
    """Processor time of the dashboard: what a page costs whatever else the machine does."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _times(url: str, path: str, repeats: int) -> list[float]:
    place, _, token = url.removeprefix("http://").partition("/?token=")
    found = []
    for _ in range(repeats):
        time.sleep(1.05)
        connection = http.client.HTTPConnection(place, timeout=60)
        started = time.perf_counter()
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        content = answer.read()
        found.append(time.perf_counter() - started)
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{path} answers {answer.status}: {content[:300]!r}")
    return found


def make_project(root: Path, arguments: argparse.Namespace) -> Path:
    """A project in the middle of everything, without the states themselves."""
    import hashlib
    import random

    from eyas.base.layout import Layout
    from eyas.base.seal import sealed_folder
    from eyas.store.entry import SampleEntry
    from eyas.store.ledger import Ledger

    example = Path(__file__).resolve().parents[1] / "examples" / "kimi-k2.5"
    layout = Layout(root)
    (root / "target").mkdir(parents=True)
    layout.config.write_text((example / "eyas.toml").read_text())
    (root / "target" / "config.json").write_text((example / "target" / "config.json").read_text())
    source, count = random.Random(0), arguments.samples
    with sealed_folder(
        layout.samples, {"num_samples": count, "num_tokens": 2000 * count, "num_supervised": 150 * count}
    ):
        pass
    ids = [hashlib.md5(str(n).encode()).hexdigest() for n in range(count)]
    entries = [SampleEntry(id_, source.randint(200, 4000), 150, "train", "chats") for id_ in ids]
    with Ledger.open(layout.ledger) as ledger:
        ledger.replace_samples(entries)
        layout.segments.mkdir(parents=True)
        for number in range(50):
            part = entries[number * count // 100 : (number + 1) * count // 100]
            name = f"seg-{number:06d}-00000000.safetensors"
            (layout.segments / name).write_bytes(b"x" * 100)
            ledger.commit_segment(name, 100, "recipe", [(e.id, e.length, e.num_supervised) for e in part])
    attempt = layout.logs / "attempt-0001"
    attempt.mkdir(parents=True)
    with open(attempt / "events.jsonl", "w") as log:
        for number in range(arguments.events):
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(1_790_000_000 + 5 * number))
            detail = {"stage": "extract", "label": "capture", "unit": "tokens", "done": 900 * number,
                      "total": 10**9, "rate": 180.0, "bytes": number}  # fmt: skip
            log.write(json.dumps({"at": at, "attempt": 1, "kind": "progress", "detail": detail}) + "\n")
    layout.drafter.mkdir()
    with open(layout.metrics, "w") as metrics:
        for step in range(1, arguments.steps + 1):
            row = {
                "kind": "train", "step": step, "at": "2026-11-01T00:00:00Z", "loss": 3.0, "grad_norm": 1.0,
                "step_loss": [1.0] * 7, "lr": 1e-3, "tokens": 2000 * step, "tokens_per_second": 1e4,
                "data_wait_seconds": 0.001,
            }  # fmt: skip
            metrics.write(json.dumps(row) + "\n")
    return root
