"""A project folder whose servers are gone when the test is over, however it ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.targets.serving import projects


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    yield folder
    projects.end_all(folder)
