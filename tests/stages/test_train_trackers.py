"""Trackers of a whole run: refused before it begins, or fed by it, and no part of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.base.errors import ConfigError
from eyas.base.progress import SilentProgress
from eyas.drafter.trackers import kinds
from eyas.pipeline.order import STAGES
from eyas.pipeline.run import run
from eyas.stages.project import Project
from tests.projects import make_project, tiny_target

UNTIL_TRAIN = [stage for stage in STAGES if stage.name not in ("evaluate", "export")]


def train(root: Path, trackers: str) -> None:
    project = Project.open(root, [f"train.trackers={trackers}"])
    run(project, verb="run", progress=lambda name: SilentProgress(), stages=UNTIL_TRAIN)


def test_a_missing_package_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    monkeypatch.setattr(kinds, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        train(root, '["wandb"]')
    assert "pip install 'eyas[wandb]'" in str(caught.value.hint)
    assert not (root / "data" / "samples").exists()


def test_an_unknown_tracker_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    with pytest.raises(ConfigError, match="trackers"):
        Project.open(root, ['train.trackers=["tensorbord"]'])


def test_tensorboard_beside_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=6)
    train(root, '["tensorboard"]')
    read = EventAccumulator(str(root / "drafter" / "trackers" / "tensorboard"))
    read.Reload()
    steps = [event.step for event in read.Scalars("train/loss")]
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    assert read.Scalars("validation/walk_tau")[-1].step == steps[-1]
    # trackers decide nothing about the weights: without them the run is as done as it was
    train(root, "[]")
    assert len(list((root / "drafter" / "trackers" / "tensorboard").iterdir())) == 1
