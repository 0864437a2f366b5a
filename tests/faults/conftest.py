"""A target, a finished project and a quick place for projects, shared by the fault suite."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import run_child
from tests.faults.small import small_project
from tests.projects import outcome, tiny_target


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: an fsync costs nothing there."""
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="eyas-faults-", dir=shm if os.access(shm, os.W_OK) else None))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def place(memory: Path) -> Iterator[Path]:
    """A new folder for one test."""
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def model(memory: Path) -> Path:
    return tiny_target(memory / "model")


@pytest.fixture(scope="session")
def finished(model: Path, memory: Path) -> Path:
    """A project that ran through unbroken; tests copy it."""
    root = small_project(memory / "finished", model)
    assert run_child(root) == 0, (root / "last-error.txt").read_text()
    return root


@pytest.fixture(scope="session")
def expected(finished: Path) -> dict[str, Any]:
    """What every broken run has to come to in the end."""
    found = outcome(finished)
    assert len(found["store"]) >= 4
    return found
