"""Projects in the phases that people look at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import eyas
from tests.projects import make_project, tiny_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that ran through in one go; tests read it or copy it."""
    root = make_project(tmp_path_factory.mktemp("finished") / "p", target)
    done = eyas("run", "--project", root)
    assert done.code == 0, done.err
    return root


@pytest.fixture
def fresh(target: Path, tmp_path: Path) -> Path:
    return make_project(tmp_path / "new", target)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "p", symlinks=True))
