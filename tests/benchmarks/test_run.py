"""The harness and its quick benchmarks, on something tiny: they run, and print what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import eyas
from tests.projects import make_project, tiny_target
from tests.tiny import save_tiny_target

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def call(*words: str) -> list[str]:
    done = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_list_names_every_benchmark_with_what_it_measures() -> None:
    lines = call("--list")
    files = {path.stem for path in RUN.parent.glob("*.py")} - {"run"}
    assert {line.split()[0] for line in lines} == files
    assert all(len(line.split()) > 3 for line in lines)
    assert call() == lines


def test_an_unknown_name_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, str(RUN), "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "startup" in done.stderr


def test_startup_loads_no_torch() -> None:
    result = json.loads(call("startup", "--repeats", "1", "--samples", "100")[-1])
    assert list(result) == ["name", "value", "unit", "baseline", "ratio", "details"]
    assert result["details"]["heavy_modules_loaded"] == {"help": [], "status": []}
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"], rel=0.05)


def test_extract_measures_the_stage_itself(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_target(model)
    words = ("--model", str(model), "--tokens", "600", "--rounds", "1", "--folder", str(tmp_path))
    result = json.loads(call("extract", *words)[-1])
    assert result["unit"] == "tokens/s"
    assert result["details"]["bytes"] > 0
    assert result["details"]["tokens"] >= 600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_tree_is_measured_beside_the_chain(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=12)
    assert eyas("run", "--project", root).code == 0
    words = ("--project", str(root), "--prompts", "3", "--max-new-tokens", "12", "--total", "2,12")
    result = json.loads(call("tree", *words)[-1])
    ways = result["details"]["ways"]
    assert set(ways) == {"chain", "tree of 2", "tree of 12"}
    assert all(row["equal_texts"] == result["details"]["prompts"] > 0 for row in ways.values())
    assert result["baseline"] == ways["chain"]["acceptance_length"]
    assert result["value"] == max(ways[name]["acceptance_length"] for name in ways if name != "chain")
