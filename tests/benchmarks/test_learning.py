"""Time to an acceptance length, on a tiny project that was trained."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from benchmarks.training.child import PEERS
from benchmarks.training.learner import full_rows

from eyas.base.progress import SilentProgress
from eyas.drafter.rows import supervised_rows
from eyas.pipeline.order import STAGES
from eyas.pipeline.run import run
from eyas.stages.project import Project
from tests.benchmarks.test_run import call
from tests.drafter.cases import make_sample
from tests.projects import make_project, tiny_target


def points(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"cpu": cpu, "length": length} for cpu, length in pairs]


def test_where_a_curve_crosses_a_length() -> None:
    reached = import_module("benchmarks.time-to-acceptance")._reached
    curve = points((10.0, 1.1), (20.0, 1.3), (30.0, 1.5))
    assert reached(curve, 1.4) == pytest.approx(25.0)
    assert reached(curve, 1.05) == 10.0
    assert reached(curve, 1.6) is None


def test_peers_get_the_states_and_rows_that_eyas_trains_on() -> None:
    sample, (_, spans, _, last) = make_sample("s", 12, [(3, 7), (9, 12)], 1)
    states, supervised = full_rows(sample)
    expected = supervised_rows(spans, 12, 0)
    assert torch.nonzero(supervised).flatten().tolist() == expected.tolist()
    for row in expected:
        assert torch.equal(states[row + 1], last[row + 1].float())


@pytest.mark.skipif(not PEERS.is_dir(), reason="make peers has not been run")
def test_a_recipe_beside_a_peers(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=6)
    stages = [stage for stage in STAGES if stage.name not in ("evaluate", "export")]
    run(Project.open(root), verb="run", progress=lambda name: SilentProgress(), stages=stages)
    words = ("--project", str(root), "--length", "1.0", "--every", "1", "--limit", "2", "--threads", "1")
    result = json.loads(call("time-to-acceptance", *words, "--against", "speculators", "--epochs", "2")[-1])
    details = result["details"]
    assert details["not_run"] == {}
    assert set(details["curves"]) == {"eyas", "speculators"}
    assert all(point[2] >= 1 for curve in details["curves"].values() for point in curve)
