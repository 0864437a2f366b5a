"""Messages: each state is told once, and a killed run is told by somebody else."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eyas.pipeline.lock import hold_lock
from eyas.report.notices import notices
from eyas.report.now import STALL_SECONDS, LastAttempt, Running
from eyas.report.status import ProjectStatus, project_status
from eyas.stages.project import Project
from tests.cli.command import eyas, eyas_process
from tests.faults.small import tmpfs
from tests.projects import make_project, tiny_target

pytest.importorskip("apprise")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


class Inbox:
    """A server that keeps what apprise's JSON service sends."""

    def __init__(self) -> None:
        inbox, self.messages = self, list[dict[str, str]]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                inbox.messages.append(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wait_for(self, title: str) -> dict[str, str]:
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            for message in list(self.messages):
                if title in message["title"]:
                    return message
            time.sleep(0.1)
        raise AssertionError(f"no {title!r} among {self.messages}")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    kept = Inbox()
    yield kept
    kept.server.shutdown()
    kept.server.server_close()


@pytest.fixture
def new(target: Path, tmp_path: Path) -> Path:
    return make_project(tmp_path / "p", target)


def running(status: ProjectStatus, *, stalled: bool = False) -> ProjectStatus:
    now = Running(
        1, "here", "run", "", "extract", "capture", 1, 2, "tokens", 1.0, 1, 1, 1, 1000.0, stalled, {}
    )
    return replace(status, running=now)


def ended(status: ProjectStatus, outcome: str, name: str = "attempt-0007") -> ProjectStatus:
    return replace(status, running=None, last_attempt=LastAttempt(name, "", "", 1.0, outcome, "why", None))


def done(status: ProjectStatus) -> ProjectStatus:
    return replace(status, stages=tuple(replace(stage, state="done") for stage in status.stages))


def test_each_change_is_told_once(new: Path) -> None:
    quiet = project_status(Project.open(new))
    quiet = replace(quiet, disk=replace(quiet.disk, low=False, fits=True))
    at_work, full = running(quiet), replace(quiet, disk=replace(quiet.disk, low=True))
    hurt = replace(quiet, damages=("extract: damaged: seg-1: short",))
    cases = [
        (quiet, quiet, []),
        (quiet, at_work, []),
        (at_work, running(quiet, stalled=True), ["stalled"]),
        (running(quiet, stalled=True), running(quiet, stalled=True), []),
        (at_work, ended(quiet, "unfinished"), ["stopped"]),
        (at_work, ended(quiet, "DiskFull"), ["stopped"]),
        (at_work, done(ended(quiet, "done")), ["finished"]),
        # it began and ended between two looks
        (quiet, ended(quiet, "unfinished"), ["stopped"]),
        (ended(quiet, "unfinished"), ended(quiet, "unfinished"), []),
        (quiet, full, ["disk_low"]),
        (full, full, []),
        (quiet, hurt, ["damage"]),
        (hurt, hurt, []),
    ]
    for number, (before, after, expected) in enumerate(cases):
        assert [notice.kind for notice in notices(before, after)] == expected, number
    (notice,) = notices(at_work, ended(quiet, "DiskFull"))
    assert "DiskFull: why" in notice.text
    assert "next: eyas run" in notice.text


def test_a_test_message_arrives_and_wrong_addresses_are_named(
    new: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE_TO", inbox.url)
    sent = eyas("notify", "--test", "--project", new, "--set", 'notify.urls=["env:WHERE_TO"]')
    assert sent.code == 0, sent.err
    assert inbox.wait_for("test")["message"] == "messages arrive"
    nobody = eyas("notify", "--test", "--project", new)
    assert (nobody.code, "notify.urls" in nobody.err) == (2, True)
    secret = eyas("notify", "--test", "--project", new, "--set", 'notify.urls=["nonsense://hunter2"]')
    assert secret.code == 2
    assert "hunter2" not in secret.out + secret.err
    unset = eyas("notify", "--test", "--project", new, "--set", 'notify.urls=["env:NOT_SET_ANYWHERE"]')
    assert (unset.code, "NOT_SET_ANYWHERE" in unset.err) == (2, True)


@contextlib.contextmanager
def watched(root: Path, inbox: Inbox) -> Iterator[None]:
    """``eyas notify`` beside a project, as a person starts it; it has looked once when the block begins."""
    with open(root / "eyas.toml", "a") as file:
        file.write(f'\n[notify]\nurls = ["{inbox.url}"]\n')
    process = eyas_process("notify", "--every", "0.2", "--project", root)
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith(f"watching {root.name} for stalled, stopped, disk low, damage, finished"), (
            first
        )
        yield
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_damage_arrives(new: Path, inbox: Inbox) -> None:
    assert eyas("run", "--until", "extract", "--project", new).code == 0
    with watched(new, inbox):
        segment = next((new / "store" / "segments").glob("*.safetensors"))
        segment.write_bytes(segment.read_bytes()[:-9])
        told = inbox.wait_for("damage found")
    assert segment.name in told["message"]
    assert f"next: eyas run --project {new}" in told["message"]
    assert len(inbox.messages) == 1


def test_a_stalled_run_arrives(new: Path, inbox: Inbox) -> None:
    """The process lives and holds the lock, and its last event is older than the limit."""
    folder = new / "logs" / "attempt-0001"
    folder.mkdir(parents=True)

    def events(seconds_ago: float) -> str:
        at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
        start = {"at": at, "attempt": 1, "kind": "attempt started", "detail": {"pid": os.getpid()}}
        return json.dumps(start) + "\n"

    with hold_lock(new / "state", "run"):
        (folder / "events.jsonl").write_text(events(STALL_SECONDS - 60))
        with watched(new, inbox):
            time.sleep(1)
            assert inbox.messages == []
            (folder / "events.jsonl").write_text(events(STALL_SECONDS + 60))
            told = inbox.wait_for("stalled")
    assert "the process is alive" in told["message"]
    assert "next: eyas logs --follow" in told["message"]


def test_a_disk_that_fills_up_arrives(target: Path, inbox: Inbox, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    with tmpfs(tmp_path / "disk", "size=64m") as disk:
        root = make_project(disk / "p", target, more='[disk]\nreserve = "1MB"\nwarn = "16MB"')
        assert eyas("run", "--until", "regenerate", "--project", root).code == 0
        with watched(root, inbox):
            time.sleep(1)
            assert inbox.messages == []
            (disk / "of somebody else").write_bytes(bytes(56_000_000))
            told = inbox.wait_for("disk low")
    assert re.search(r"^[\d.]+ MB free, [\d.]+ [kM]B to be written", told["message"]), told


def test_a_killed_run_and_a_finished_one_are_told(new: Path, inbox: Inbox) -> None:
    with open(new / "eyas.toml", "a") as file:
        file.write(f'\n[notify]\nurls = ["{inbox.url}"]\n')
    process = eyas_process("run", "--project", new)
    try:
        log = new / "logs" / "latest" / "events.jsonl"
        deadline = time.monotonic() + 900
        while not (log.exists() and '"label": "capture"' in log.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    told = inbox.wait_for("stopped")
    assert "killed, or the machine went down" in told["message"]
    assert "next: eyas run" in told["message"]
    finished = eyas_process("run", "--project", new)
    _, err = finished.communicate(timeout=900)
    assert finished.returncode == 0, err
    assert "acceptance length" in inbox.wait_for("finished")["message"]
    assert [m["title"] for m in inbox.messages] == ["eyas p: stopped", "eyas p: finished"]
