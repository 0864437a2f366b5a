"""A project whose store has a bound: answered, and trained to its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import eyas
from tests.faults.forked import error_of, run_child
from tests.projects import tiny_target
from tests.waves import (
    bounded_project,
    noting_batches,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def answered(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a bound whose samples are ready to be captured."""
    root = bounded_project(tmp_path_factory.mktemp("answered") / "p", model)
    assert eyas("run", "--project", root, "--until", "regenerate").code == 0
    return root


@pytest.fixture
def project(answered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(answered, tmp_path / "p", symlinks=True))


@pytest.fixture(scope="module")
def trained(answered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, trained unbroken; its batches lie beside it."""
    folder = tmp_path_factory.mktemp("trained")
    root = Path(shutil.copytree(answered, folder / "p", symlinks=True))
    assert run_child(root, prepare=noting_batches(folder / "batches")) == 0, error_of(root)
    return root
