"""Over a real sshd on loopback: quoting, deadlines, one connection, the chain of ways, push, a run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.base.errors import HostUnreachable
from eyas.hosts.chain import Chain
from eyas.hosts.declared import open_host
from eyas.hosts.gpus import SmiGpus
from eyas.hosts.ssh import Ssh
from eyas.recovery.doctor import diagnose
from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from tests.cli.command import eyas
from tests.hosts.sshd import Server, running
from tests.projects import make_project, tiny_target

AWKWARD = ["a b", "$HOME", "`id`", "x;y", "'q'", '"d"', "*", "\\", "", "-n", "line\nbreak", "ü", "&& false"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("sshd") / "s") as found:
        yield found


@pytest.fixture
def peer(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ssh]:
    monkeypatch.setenv("PATH", f"{server.bin}:{os.environ['PATH']}")
    host = Ssh("peer", server.peer)
    yield host
    host.close()


def test_words_arrive_as_they_were_given(peer: Ssh) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    result = peer.run([sys.executable, "-c", code, *AWKWARD])
    assert result.ok, result.err
    assert json.loads(result.out) == AWKWARD


def test_words_arrive_through_something_inside_as_well(server: Server, peer: Ssh) -> None:
    inside = Ssh("inside", server.peer, ["env", "WHERE=container 129"])
    code = "import json, os, sys; print(json.dumps([os.environ['WHERE'], *sys.argv[1:]]))"
    result = inside.run([sys.executable, "-c", code, *AWKWARD])
    assert json.loads(result.out) == ["container 129", *AWKWARD]


def test_exit_codes_and_deadlines(peer: Ssh) -> None:
    assert peer.run(["sh", "-c", "exit 7"]).code == 7
    assert peer.run(["sh", "-c", "exit 255"]).code == 255  # not taken for a broken connection
    started = time.monotonic()
    result = Ssh("peer", "eyas-test-peer", connect_seconds=2).run(["sleep", "600"], timeout_seconds=2)
    assert result.timed_out
    assert time.monotonic() - started < 120


def test_one_connection_is_shared(server: Server, peer: Ssh) -> None:
    before = server.log.read_text().count("Accepted publickey")
    for _ in range(4):
        assert peer.run(["true"]).ok
    assert server.log.read_text().count("Accepted publickey") - before <= 1


def test_files_are_read_and_missing_ones_named(peer: Ssh, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("content")
    assert peer.read_text(str(tmp_path / "a file")) == "content"
    with pytest.raises(FileNotFoundError):
        peer.read_text(str(tmp_path / "none"))


def test_the_next_way_is_taken_when_the_first_hangs(server: Server, peer: Ssh) -> None:
    silent = Ssh("box", server.silent, connect_seconds=2)
    chain = Chain("box", [silent, Ssh("box", server.peer, ["env", "--"])])
    assert chain.run(["echo", "here"]).out == "here\n"
    assert len(chain.tried) == 1
    assert server.silent in chain.tried[0]


def test_no_way_answers(server: Server, peer: Ssh) -> None:
    chain = Chain("box", [Ssh("box", server.silent, connect_seconds=1)])
    with pytest.raises(HostUnreachable) as caught:
        chain.run(["true"])
    assert caught.value.exit_code == 13
    assert server.silent in str(caught.value)


def test_a_destination_is_never_an_option(peer: Ssh, tmp_path: Path) -> None:
    evil = Ssh("evil", f"-oProxyCommand=touch {tmp_path}/owned", connect_seconds=2)
    with pytest.raises(HostUnreachable):
        evil.reach()
    assert not (tmp_path / "owned").exists()


def _project(tmp_path: Path, server: Server) -> tuple[Path, Path]:
    model = tiny_target(tmp_path / "model")
    there = tmp_path / "there" / "p"
    more = (
        f'[[hosts]]\nname = "box"\nproject = "{there}"\npython = "{sys.executable}"\nconnect_seconds = 5\n'
        f'[[hosts.ways]]\nssh = "{server.silent}"\n'
        f'[[hosts.ways]]\nssh = "{server.peer}"\ninside = ["env", "HOME={tmp_path}"]\n'
    )
    root = make_project(tmp_path / "here" / "p", model, count=4, more=more)
    return root, there


def test_doctor_looks_at_a_machine_without_eyas(server: Server, peer: Ssh, tmp_path: Path) -> None:
    root, _ = _project(tmp_path, server)
    project = Project.open(root)
    host = open_host(project.config.hosts[0])
    found = {line.check: line for line in diagnose(Scene(project, host, SmiGpus(host))).lines}
    assert found["memory"].state in ("ok", "warn")
    assert found["store"].state == "unknown"
    done = eyas("doctor", "--host", "box", "--project", root, "--json")
    assert done.code == 0, done.err
    assert {c["check"] for c in done.json["checks"] if c["state"] != "unknown"} >= {"memory", "gpus"}


def test_push_run_there_and_follow(server: Server, peer: Ssh, tmp_path: Path) -> None:
    root, there = _project(tmp_path, server)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eyas", *words, "--project", str(root)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280)

    refused = call("status", "--host", "box")
    assert refused.returncode == 13
    assert f"eyas push --project {root} --host box" in refused.stderr
    there.mkdir(parents=True)
    (there / "prompts.jsonl").write_text("theirs\n")
    pushed = call("push", "--host", "box", "--run", "--json")
    assert pushed.returncode == 0, pushed.stderr
    told = json.loads(pushed.stdout)
    assert told["eyas"].startswith(str(tmp_path))
    assert set(told["sent"]) == {"eyas.toml", "prompts.jsonl"}
    assert told["set_aside"] == ["prompts.jsonl"]
    (aside,) = (there / "set-aside").rglob("prompts.jsonl")
    assert aside.read_text() == "theirs\n"
    followed = call("logs", "--follow", "--host", "box")  # ends with the run
    assert followed.returncode == 0, followed.stderr
    status = call("status", "--host", "box", "--json")
    stages = {stage["name"]: stage["state"] for stage in json.loads(status.stdout)["stages"]}
    assert set(stages.values()) == {"done"}, status.stdout
    asked = call("logs", "--host", "box")
    assert asked.returncode == 0
    todo = call("todo", "--host", "box")
    assert f"next: eyas status --host box --project {root}" in todo.stderr
    doctor = call("doctor", "--host", "box", "--json")
    checks = {check["check"]: check["state"] for check in json.loads(doctor.stdout)["checks"]}
    assert checks["store"] == "ok"
    again = json.loads(call("push", "--host", "box", "--json").stdout)
    assert again["sent"] == []
    assert not (root / "store").exists()  # it ran there, not here
