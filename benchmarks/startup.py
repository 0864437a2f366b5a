"""Wall time of `eyas --help` and `eyas status` beside that of an empty Python."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAME = "startup"

LIMITS = {"help": 0.3, "status": 0.5}
SOURCE = Path(__file__).resolve().parents[1] / "src"
HEAVY = ("torch", "transformers", "numpy", "pyarrow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=10, help="runs of each command; the best counts")
    parser.add_argument(
        "--samples", type=int, default=40_000, help="samples in the project that status reads"
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Time the commands in turn, so that a busy moment hits all of them alike."""
    with tempfile.TemporaryDirectory() as folder:
        project = _make_project(Path(folder), arguments.samples)
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "help": [sys.executable, "-m", "eyas", "--help"],
            "status": [sys.executable, "-m", "eyas", "status", "--project", str(project)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            _timed(command)  # fills the page cache and __pycache__
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                seconds[name].append(_timed(command))
        loaded = {name: _loaded(commands[name]) for name in LIMITS}
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "name": NAME,
        "value": round(best["help"], 4),
        "unit": "s",
        "baseline": round(best["python"], 4),
        "ratio": round(best["help"] / best["python"], 2),
        "details": {
            "baseline_is": "python -c pass",
            "repeats": arguments.repeats,
            "help_seconds": round(best["help"], 4),
            "status_seconds": round(best["status"], 4),
            "status_samples": arguments.samples,
            "limits_seconds": LIMITS,
            "within_limits": all(best[name] < limit for name, limit in LIMITS.items()),
            "heavy_modules_loaded": loaded,
            "torch_loaded": any("torch" in modules for modules in loaded.values()),
        },
    }


def _environment() -> dict[str, str]:
    # the first start leaves compiled modules for the next ones, unless something forbids it
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(SOURCE)}


def _timed(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, env=_environment(), check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.decode()}")
    return seconds


def _loaded(command: list[str]) -> list[str]:
    """Heavy packages that a command imports, as Python itself reports its imports."""
    python, *rest = command
    done = subprocess.run(
        [python, "-X", "importtime", *rest], capture_output=True, text=True, env=_environment(), check=True
    )
    names = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    return [package for package in HEAVY if package in names]


def _make_project(folder: Path, num_samples: int) -> Path:
    """A project in the middle of extraction, whose ledger holds many samples."""
    import hashlib

    from eyas.base.layout import Layout
    from eyas.base.seal import sealed_folder
    from eyas.store.entry import SampleEntry
    from eyas.store.ledger import Ledger

    example = Path(__file__).resolve().parents[1] / "examples" / "kimi-k2.5"
    layout = Layout(folder / "project")
    layout.root.mkdir()
    (layout.root / "target").mkdir()
    layout.config.write_text((example / "eyas.toml").read_text())
    (layout.root / "target" / "config.json").write_text((example / "target" / "config.json").read_text())
    with sealed_folder(layout.samples, {"num_samples": num_samples}):
        pass
    ids = [hashlib.md5(str(n).encode()).hexdigest() for n in range(num_samples)]
    with Ledger.open(layout.ledger) as ledger:
        ledger.replace_samples(SampleEntry(id_, 2000, 1500, "train", "chats") for id_ in ids)
        half = [(id_, 2000, 1500) for id_ in ids[: num_samples // 2]]
        ledger.commit_segment("seg-000001-00000000.safetensors", 1 << 28, "recipe", half)
    return layout.root
