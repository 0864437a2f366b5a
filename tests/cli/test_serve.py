"""``eyas serve``: servers that outlive the command that started them; a scripted process is the engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.pipeline.lock import hold_lock
from tests.cli.command import eyas, eyas_process
from tests.targets.serving import projects


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    yield folder
    projects.end_all(folder)


def test_start_status_logs_stop(root: Path) -> None:
    projects.make(root, serve="replicas = 2")
    child = eyas_process("serve", "start", "--mode", "capture", "--project", root, "--json")
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, out + err
    running = projects.processes_of(root)
    assert len(running) == 2  # the command has ended, its servers have not

    told = eyas("serve", "status", "--project", root, "--json").json["servers"]
    assert {server["pid"] for server in told} == running
    assert {server["state"] for server in told} == {"running"}
    assert all(server["kept"] and server["used_by"] is None for server in told)
    (Path(told[1]["dump_dir"]) / "attempt1-abcdef.dump").write_bytes(bytes(100))
    told = eyas("serve", "status", "--project", root, "--json").json["servers"]
    assert [(server["dumps"], server["dump_bytes"]) for server in told] == [(0, 0), (1, 100)]
    plain = eyas("serve", "status", "--project", root)
    assert "capture" in plain.out
    assert "next: eyas serve stop" in plain.err

    logs = eyas("serve", "logs", "--server", "1", "--project", root)
    assert logs.out == "scripted engine: the first line\n"
    assert Path(logs.err.strip()).name == "server-capture-1.log"

    stopped = eyas("serve", "stop", "--project", root)
    assert stopped.code == 0
    assert stopped.err.count("no process left, port") == 2
    assert projects.processes_of(root) == set()
    assert eyas("serve", "status", "--project", root, "--json").json["servers"] == []
    assert "no server runs" in eyas("serve", "stop", "--project", root).err
    # the output of a server that is gone can still be read
    assert eyas("serve", "logs", "--project", root).out == "scripted engine: the first line\n"


def test_a_failed_start_says_why_and_leaves_nothing(root: Path) -> None:
    projects.make(root, SCRIPT_DIE="3")
    done = eyas("serve", "start", "--project", root, "--json")
    assert done.code == 13
    assert done.json["error"] == "ServerNotStarted"
    assert "no kernel image is available" in done.json["why"]
    assert projects.processes_of(root) == set()


def test_a_dry_run_starts_nothing(root: Path) -> None:
    projects.make(root, SCRIPT_DIE="3")
    done = eyas("serve", "start", "--dry-run", "--mode", "capture", "--project", root)
    assert done.code == 0
    assert "--speculative-config" in done.out
    assert not (root / "state").exists()
    draft = eyas("serve", "start", "--dry-run", "--mode", "draft", "--project", root)
    assert draft.code == 2
    assert "no exported drafter" in draft.err


def test_a_server_that_ended_by_itself_is_shown_and_cleared(root: Path) -> None:
    projects.make(root)
    assert eyas("serve", "start", "--project", root).code == 0
    (told,) = eyas("serve", "status", "--project", root, "--json").json["servers"]
    os.kill(told["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while projects.processes_of(root) and time.monotonic() < deadline:
        time.sleep(0.05)
    (told,) = eyas("serve", "status", "--project", root, "--json").json["servers"]
    assert told["state"] == "ended"
    assert len(eyas("serve", "stop", "--project", root, "--json").json["stopped"]) == 1
    assert eyas("serve", "status", "--project", root, "--json").json["servers"] == []


def test_no_server_is_started_while_somebody_writes(root: Path) -> None:
    projects.make(root)
    with hold_lock(root / "state", "extract"):
        done = eyas_process("serve", "start", "--project", root)
        _, err = done.communicate(timeout=120)
    assert done.returncode == 11
    assert "is writing to this project" in err
    assert projects.processes_of(root) == set()


def test_words_that_mean_nothing(root: Path) -> None:
    projects.make(root)
    for words in (["start", "--mode", "nothing"], ["logs", "--server", "7"], ["patch", "nothing"]):
        assert eyas("serve", *words, "--project", root).code == 2
    assert eyas("serve", "logs", "--project", root).code == 2
    assert "no patch is declared" in eyas("serve", "patch", "apply", "--project", root).err
