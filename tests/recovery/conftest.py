"""A finished project that is copied for each fault, on a machine that a test decides."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target
from tests.recovery.machine import FakeGpus, FakeHost

MORE = """
[disk]
reserve = "1MB"
warn = "2MB"
[recovery]
stop_seconds = 3
watch_seconds = 240
watch_samples = 1
[[recovery.files]]
path = "{outside}/extract-helper.py"
source = "helper.py"
"""
HELPER = "print('a script that lives where a reboot wipes')\n"


def make_at(base: Path, model: Path, count: int = 8) -> Path:
    """A project with a needed file outside of it."""
    (base / "outside").mkdir(parents=True)
    root = make_project(base / "p", model, count=count, more=MORE.format(outside=base / "outside"))
    text = (root / "eyas.toml").read_text().replace('device = "cpu"', 'device = "auto"')
    # a segment for nearly each sample, however quick the machine is
    text = text.replace("segment_seconds = 0.05", "segment_seconds = 0.0001")
    (root / "eyas.toml").write_text(text)
    (root / "helper.py").write_text(HELPER)
    (base / "outside" / "extract-helper.py").write_text(HELPER)
    return root


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder above a finished project ``p`` and its target ``model``; to be copied, not changed."""
    base = tmp_path_factory.mktemp("finished")
    root = make_at(base, tiny_target(base / "model"))
    done = eyas("run", "--project", root)
    assert done.code == 0, done.err
    return base


@pytest.fixture
def project_copy(finished: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies the finished project (with its target); the copy's configuration names the copies."""
    numbers = iter(range(1000))

    def copy() -> Path:
        base = tmp_path / f"copy{next(numbers)}"
        shutil.copytree(finished, base, symlinks=True)
        config = base / "p" / "eyas.toml"
        config.write_text(config.read_text().replace(str(finished), str(base)))
        return base / "p"

    return copy


def scene_of(
    root: Path, host: FakeHost | None = None, gpus: FakeGpus | None = None, **options: object
) -> Scene:
    """A look at a project on a fake machine with two idle GPUs."""
    return Scene(Project.open(root), host or FakeHost(), gpus or FakeGpus(), **options)  # type: ignore[arg-type]
