"""The forecast: of the founding run by hand, and of a small run against what it really writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.report.forecast import forecast
from eyas.stages.project import Project
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target

EXAMPLE = Path(__file__).parents[2] / "examples" / "kimi-k2.5"


def test_the_founding_run() -> None:
    done = eyas("run", "--dry-run", "--project", EXAMPLE, "--json")
    assert done.code == 0, done.err
    found = done.json["forecast"]
    tokens, width = 87_793_206, 7168 * 2
    assert found["bytes_per_token"] == 57_344 == 4 * width
    assert found["samples"] == 37_312
    assert found["raw_bytes"] == tokens * 57_344
    assert found["raw_bytes"] == pytest.approx(5.03e12, rel=0.01)
    assert found["store_bytes"] == tokens * (3 * width + 4) + round(tokens / 2) * width
    assert found["fits"]
    text = eyas("run", "--dry-run", "--project", EXAMPLE)
    for needle in ("57,344 bytes a token", "5.0 TB", "saves 629.0 GB", "37,312 samples", "it fits"):
        assert needle in text.out, needle
    small = eyas("run", "--dry-run", "--project", EXAMPLE, "--set", "disk.budget=2.3TB")
    assert "it does not fit: 19," in small.out


def test_a_small_run_writes_what_was_forecast(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"))
    assert eyas("run", "--dry-run", "--project", root, "--json").json["forecast"] is None
    assert eyas("run", "--until", "regenerate", "--project", root).code == 0
    found = eyas("run", "--dry-run", "--project", root, "--json").json["forecast"]
    assert eyas("extract", "--project", root).code == 0
    data = 0
    for path in (root / "store" / "segments").iterdir():
        header = int.from_bytes(path.read_bytes()[:8], "little")
        data += path.stat().st_size - 8 - header
    assert found["basis"] == "counted"
    assert found["store_bytes"] == pytest.approx(data, rel=0.01)
    assert eyas("run", "--project", root).code == 0
    exported = (root / "exports" / "eagle3" / "model.safetensors").stat().st_size
    trained = forecast(Project.open(root))
    assert trained is not None
    # with the draft vocabulary chosen its size is known; before, the largest possible was taken
    assert trained.export_bytes == pytest.approx(exported, rel=0.08)
    assert found["export_bytes"] > 1.1 * trained.export_bytes
    again = eyas("run", "--dry-run", "--project", root)
    assert "forecast" not in again.out  # nothing is left to be written
