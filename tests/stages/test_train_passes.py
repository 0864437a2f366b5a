"""A run says when its training goes without the compiled passes, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.base.progress import SilentProgress
from eyas.drafter.kernels import compiled
from eyas.pipeline.order import STAGES
from eyas.pipeline.run import run
from eyas.stages.project import Project
from tests.drafter.passes import look_again
from tests.projects import make_project, tiny_target

UNTIL_TRAIN = [stage for stage in STAGES if stage.name not in ("evaluate", "export")]


class Heard(SilentProgress):
    def __init__(self, said: list[str]) -> None:
        self._said = said

    def say(self, message: str) -> None:
        self._said.append(message)


@pytest.mark.parametrize("built", [True, False])
def test_a_word_where_they_are_missing(built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if built and (reason := compiled.why_not()):
        pytest.skip(f"no compiled passes: {reason}")
    look_again()
    calls: list[str] = []
    whole = compiled.Kernels.loss_rows
    monkeypatch.setattr(
        compiled.Kernels, "loss_rows", lambda *given, **named: calls.append("loss") or whole(*given, **named)
    )
    if not built:
        monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    said: list[str] = []
    try:
        project = Project.open(make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4))
        run(project, verb="run", progress=lambda name: Heard(said), stages=UNTIL_TRAIN)
    finally:
        look_again()
    words = [line for line in said if "compiled passes" in line]
    assert len(words) == (0 if built else 1)
    assert bool(calls) == built
    assert built or "for want of a C++ compiler" in words[0]
