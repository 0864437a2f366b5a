"""The tutorials do what they say. A tiny random target stands in for the models that they name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.old_run import write_old_run
from tests.docs.pages import run_page
from tests.projects import tiny_target

REPOSITORY = Path(__file__).parents[2]
FAKE = REPOSITORY / "tests" / "fake_engine.py"
TUTORIALS = REPOSITORY / "docs" / "tutorials"

Run = Callable[[str, dict[str, str]], int]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Carries a page out in a new folder, with ``eyas`` on the path."""
    tools, folder = tmp_path / "bin", tmp_path / "home"
    tools.mkdir()
    folder.mkdir()
    (tools / "eyas").write_text(f'#!/bin/sh\nexec {sys.executable} -m eyas "$@"\n')
    (tools / "eyas").chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
        "OMP_NUM_THREADS": "1",
    }

    def carry_out(name: str, replaced: dict[str, str]) -> int:
        return run_page(TUTORIALS / name, folder, replaced, environment)

    return carry_out


@pytest.mark.timeout(300)
def test_a_drafter_on_a_laptop(run: Run, target: Path) -> None:
    small = {
        "/models/SmolLM2-135M-Instruct": str(target),
        "regenerate.max_new_tokens=64": "regenerate.max_new_tokens=16",
        "evaluate.max_new_tokens=64": "evaluate.max_new_tokens=8",
    }
    assert run("laptop.md", small) >= 12


@pytest.mark.timeout(300)
def test_one_gpu_box(run: Run, target: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"  # is called as python -m MODULE ARGUMENTS
    engine.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {FAKE} "$@"\n')
    engine.chmod(0o755)
    small = {
        "/models/Llama-3.1-8B-Instruct": str(target),
        "/opt/vllm/bin/python": str(engine),
        "regenerate.max_new_tokens=512": "regenerate.max_new_tokens=16",
        "evaluate.max_new_tokens=128": "evaluate.max_new_tokens=8",
    }
    assert run("server.md", small) >= 14


@pytest.mark.timeout(300)
def test_break_it_and_recover(run: Run, target: Path) -> None:
    small = {
        "/models/SmolLM2-135M-Instruct": str(target),
        "regenerate.max_new_tokens=64": "regenerate.max_new_tokens=16",
        "evaluate.max_new_tokens=64": "evaluate.max_new_tokens=8",
        # several segments, as the larger states of the page's target make
        "store.segment_mib=1": "store.segment_seconds=0.0001 --set extract.batch_tokens=320",
    }
    assert run("recover.md", small) >= 16


@pytest.mark.timeout(300)
def test_old_files(run: Run, target: Path, tmp_path: Path) -> None:
    write_old_run(tmp_path / "home", target, layers=(1, 3, 5), count=20)
    small = {
        "/models/my-target": str(target),
        "evaluate.max_new_tokens=64": "evaluate.max_new_tokens=8",
    }
    assert run("old-files.md", small) >= 8
