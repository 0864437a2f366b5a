"""When extraction ends its todo list closes itself, and training begins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from eyas.hosts.gpus import Gpu
from eyas.pipeline.attempt import Attempt, attempt_folders, read_events
from eyas.pipeline.handover import Handover
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from eyas.store.todos import Phase, read_phases
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target
from tests.targets.serving.test_patches import AFTER, BEFORE, DIFF, make_engine, sha256

KEYS = ["capture", "servers", "gpus", "patches", "mapping", "training"]


def phases(root: Path) -> list[Phase]:
    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        return [phase for phase in read_phases(ledger) if phase.name == "extraction"]


def test_the_list_closes_itself_across_attempts(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("run", "--until", "extract", "--project", root).code == 0
    (phase,) = phases(root)
    assert [todo.id.partition("/")[2] for todo in phase.todos] == KEYS
    assert [todo.status for todo in phase.todos] == ["completed"] * 5 + ["pending"]
    assert phase.is_open
    assert eyas("run", "--project", root).code == 0
    (phase,) = phases(root)
    assert (phase.is_open, phase.outcome) == (False, "handed over to training")
    assert all(todo.status == "completed" and todo.evidence for todo in phase.todos)
    assert phase.todos[-1].evidence == "attempt 2 started the stage train"
    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        training = [phase for phase in read_phases(ledger) if phase.name == "training"]
    assert [(phase.id, phase.outcome) for phase in training] == [("training-2", "exported")]
    assert [todo.id.partition("/")[2] for todo in training[0].todos] == ["train", "evaluate", "export"]
    assert all(todo.status == "completed" and todo.evidence for todo in training[0].todos)
    started = [
        e["stage"] for e in read_events(attempt_folders(root / "logs")[1]) if e["event"] == "stage started"
    ]
    assert started[0] == "train"  # nothing that scans stands between


def test_an_edit_of_the_engine_is_taken_back_when_extraction_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    hooks = make_engine(tmp_path / "site")
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    (root / "hooks.diff").write_text(DIFF)
    with open(root / "eyas.toml", "a") as file:
        file.write(
            f'\n[serve]\npython = "{sys.executable}"\n[[serve.patches]]\nname = "hooks"\n'
            'package = "made_up_engine"\nfile = "hooks.py"\ndiff = "hooks.diff"\n'
            f'sha256_before = "{sha256(BEFORE)}"\nsha256_after = "{sha256(AFTER)}"\n'
        )
    assert eyas("serve", "patch", "apply", "hooks", "--project", root).code == 0
    assert eyas("run", "--until", "regenerate", "--project", root).code == 0
    assert hooks.read_text() == AFTER, "it is needed until everything is captured"
    assert eyas("run", "--until", "extract", "--project", root).code == 0
    assert hooks.read_text() == BEFORE
    (phase,) = phases(root)
    assert {todo.id.partition("/")[2]: todo.evidence for todo in phase.todos}[
        "patches"
    ] == "hooks: not applied"


def test_a_kill_before_the_closing_steps_leaves_none_of_them_out(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("prepare", "--project", root).code == 0
    for number in (7, 8):  # the first is cut off with everything captured
        with Ledger.open(root / "state" / "ledger.db") as ledger:
            attempt = Attempt(root / "logs", number, "run")
            handover = Handover(Project.open(root), ledger, attempt, "run", OneGpu())
            if number == 7:
                handover.began("extract")
            else:
                handover.began("train")
            attempt.close()
    (phase,) = phases(root)
    assert not phase.is_open
    assert [todo.status for todo in phase.todos] == ["completed"] * 6
    assert {todo.id.partition("/")[2]: todo for todo in phase.todos}["gpus"].evidence == "used: GPU 0 1.0 GB"


def test_a_drafter_that_is_trained_waits_for_no_extraction(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("prepare", "--project", root).code == 0
    with Ledger.open(root / "state" / "ledger.db") as ledger:
        attempt = Attempt(root / "logs", 5, "run")
        handover = Handover(Project.open(root), ledger, attempt, "run", OneGpu())
        handover.found_done("train")  # no extraction is open: nothing to say
        assert phases(root) == []
        handover.began("extract")
        handover.ended("extract", {})
        handover.found_done("train")
        attempt.close()
    (phase,) = phases(root)
    assert (phase.is_open, phase.outcome) == (False, "the drafter was trained before")
    assert [todo.status for todo in phase.todos] == ["completed"] * 6


class OneGpu:
    def read(self) -> list[Gpu]:
        return [Gpu(0, "fake", 80 * 10**9, 10**9, 0, ())]


def test_gpu_memory_is_evidence_and_a_failed_step_does_not_stop_training(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("prepare", "--project", root).code == 0
    (root / "state" / "servers.json").write_text("{}")  # a list of servers that cannot be read
    with Ledger.open(root / "state" / "ledger.db") as ledger:
        attempt = Attempt(root / "logs", 9, "run")
        handover = Handover(Project.open(root), ledger, attempt, "run", OneGpu())
        handover.open()
        handover.captured()
        handover.training_began()
        attempt.close()
    todos = {todo.id.partition("/")[2]: todo for todo in phases(root)[0].todos}
    assert todos["gpus"].evidence == "used: GPU 0 1.0 GB"
    assert todos["servers"].status == "blocked"
    assert "damaged" in todos["servers"].evidence
    assert todos["training"].status == "completed"
