"""Servers are started, proven, adopted, restarted, stopped; a scripted process stands in for the engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from eyas.base.errors import ConfigError, EyasError, ServerNotStarted, Stopped, TargetError
from eyas.base.layout import Layout
from eyas.base.process import ProcessIdentity
from eyas.base.stop import StopFlag
from eyas.config.server_arguments import MODES
from eyas.targets.serving import starting
from eyas.targets.serving.address import Address
from eyas.targets.serving.manager import Server, Servers
from eyas.targets.serving.process import EngineProcess, free_port
from eyas.targets.serving.records import ServerBook
from eyas.targets.serving.starting import wait_healthy
from tests.targets.serving import projects


def answers(url: str) -> bool:
    """Whether anybody listens at ``url``, without eyas' help."""
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((str(parts.hostname), int(parts.port or 0))) == 0


def book(root: Path) -> ServerBook:
    return ServerBook(Layout(root).servers)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_starts_is_proven_and_leaves_nothing(root: Path, engine: str, mode: str) -> None:
    projects.make(root, engine, serve="replicas = 2")
    (root / "export").mkdir()
    (root / "export" / "config.json").write_text("{}")
    seen: list[Server] = []
    said: list[str] = []
    with projects.open_servers(
        root, mode, canary=seen.append, drafter=root / "export", say=said.append
    ) as servers:
        assert len(set(servers.urls)) == 2
        assert [server.url for server in seen] == servers.urls
        assert servers.alive() == [True, True]
        urls = servers.urls
        assert all(answers(url) for url in urls)
        for folder in servers.dump_dirs:
            assert (folder is None) == (mode != "capture")
        assert len(projects.processes_of(root)) == 2
        assert sum("is proven at" in line for line in said) == 2
        written = [(record.index, record.ready) for record in book(root).read()]
        assert written == [(0, True), (1, True)]
        pids = [server.pid for server in servers.servers]
    assert not any(answers(url) for url in urls)
    assert projects.processes_of(root) == set()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # and no zombie either
    assert book(root).read() == []
    assert list((root / "dumps").rglob("*.dump")) == []


def test_workers_that_left_the_group_are_ended_too(root: Path) -> None:
    projects.make(root, SCRIPT_CHILD="1")
    with projects.open_servers(root):
        assert len(projects.processes_of(root)) == 3
    assert projects.processes_of(root) == set()


def test_workers_of_a_server_that_is_gone_are_ended(root: Path) -> None:
    projects.make(root, SCRIPT_CHILD="1")
    with projects.open_servers(root) as servers:
        pid = servers.servers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert projects.processes_of(root) == set()


def test_a_process_that_has_got_the_number_of_an_ended_server_is_left_alone(root: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        now = ProcessIdentity.of(stranger.pid)
        for earlier in (
            ProcessIdentity(now.pid, now.started_ticks - 1, now.boot),
            ProcessIdentity(now.pid, now.started_ticks, "an earlier boot"),
        ):
            process = EngineProcess(earlier, "marker-of-nobody")
            assert not process.leader_alive
            assert process.members() == set()
            process.end(1.0, SimulatedClock())
            assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n", timeout=30)


def test_a_deaf_server_is_killed(root: Path) -> None:
    projects.make(root, stop_seconds=0.5, SCRIPT_DEAF="1")
    with projects.open_servers(root) as servers:
        url = servers.urls[0]
    assert not answers(url)
    assert projects.processes_of(root) == set()


def test_a_dead_process_fails_at_once_with_its_log(root: Path) -> None:
    projects.make(root, SCRIPT_DIE="7")
    began = time.monotonic()
    with pytest.raises(ServerNotStarted) as caught:
        projects.open_servers(root)
    assert time.monotonic() - began < 45  # the deadline is 60 s
    assert caught.value.exit_code == 13
    assert "exit code 7" in caught.value.what
    assert "no kernel image is available" in str(caught.value.why)
    assert Path(str(caught.value.where)).is_file()
    assert book(root).read() == []


@pytest.fixture(params=["another model", "the same model", "no answer"])
def stranger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A program of somebody else's that listens: its port and its process."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if request.param == "no answer":
            listening.listen()
            yield port, os.getpid()
            return
    model = "/models/another" if request.param == "another model" else str(tmp_path / "project" / "target")
    words = ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([sys.executable, projects.SCRIPTED, *words])
    try:
        while not answers(f"http://127.0.0.1:{port}"):
            assert process.poll() is None
            time.sleep(0.05)
        yield port, process.pid
        assert process.poll() is None  # nobody ended it
    finally:
        process.kill()
        process.wait()


def test_a_port_that_another_program_was_faster_to_take(
    root: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pid = stranger
    drawn = [port]  # what two runs draw when they start servers at the same moment
    monkeypatch.setattr(starting, "free_port", lambda host: drawn.pop() if drawn else free_port(host))
    projects.make(root)
    said: list[str] = []
    with projects.open_servers(root, say=said.append) as servers:
        assert not drawn
        assert f":{port}" not in servers.urls[0]
        assert answers(servers.urls[0])
        assert len(projects.processes_of(root)) == 1
    assert any(f"process {pid} took port {port} before it" in line for line in said)
    assert projects.processes_of(root) == set()
    assert book(root).read() == []


def test_a_command_that_is_not_there(root: Path) -> None:
    projects.make(root)
    text = (root / "eyas.toml").read_text()
    (root / "eyas.toml").write_text(text.replace('command = ["', 'command = ["/nowhere'))
    with pytest.raises(ServerNotStarted, match="cannot be started"):
        projects.open_servers(root)
    assert book(root).read() == []


class SimulatedClock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.mark.parametrize(("start_up", "in_time"), [(680.0, True), (899.0, True), (901.0, False)])
def test_a_start_up_has_900_seconds(
    root: Path, monkeypatch: pytest.MonkeyPatch, start_up: float, in_time: bool
) -> None:
    projects.make(root)
    text = (root / "eyas.toml").read_text()
    (root / "eyas.toml").write_text(text.replace("start_seconds = 60\n", ""))
    clock = SimulatedClock()
    answered = Address.health

    def health(address: Address, timeout: float = 5.0) -> str:
        return answered(address, timeout) if clock.now() >= start_up else "refused"

    monkeypatch.setattr(Address, "health", health)
    # the scripted engine really listens at some time; simulated waiting must not overtake it
    monkeypatch.setattr(
        clock, "sleep", lambda s: (time.sleep(0.01), setattr(clock, "seconds", clock.seconds + s))
    )
    if in_time:
        with projects.open_servers(root, "generate", clock=clock) as servers:
            assert len(servers.urls) == 1
            assert clock.now() >= start_up
        return
    with pytest.raises(ServerNotStarted) as caught:
        projects.open_servers(root, "generate", clock=clock)
    assert "15 min" in caught.value.what or "900" in caught.value.what
    assert "scripted engine: the first line" in str(caught.value.why)
    assert projects.processes_of(root) == set()


def test_waiting_ends_when_a_stop_is_asked_for(root: Path) -> None:
    projects.make(root, SCRIPT_START="600")
    flag = StopFlag()
    flag.request(signal.SIGTERM)
    with pytest.raises(Stopped):
        projects.open_servers(root, stop=flag)
    assert projects.processes_of(root) == set()


@pytest.mark.parametrize(
    ("mode", "environment", "what"),
    [
        ("capture", {"SCRIPT_MODEL": "/models/another"}, "serves another model"),
        ("capture", {"SCRIPT_PLUGIN": "0"}, "not in mode capture"),
        ("capture", {"SCRIPT_DUMP": "err"}, "cannot write a dump"),
        ("generate", {"SCRIPT_MODEL": "/models/another"}, "serves another model"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_is_not_what_it_should_be(
    root: Path, engine: str, mode: str, environment: dict[str, str], what: str
) -> None:
    projects.make(root, engine, **environment)
    with pytest.raises(TargetError, match=what):
        projects.open_servers(root, mode)
    assert len(list((root / "logs" / "test").glob("*.log"))) == 1  # it had its port: once was enough
    assert projects.processes_of(root) == set()
    assert book(root).read() == []


def test_a_promised_dump_that_does_not_come(root: Path) -> None:
    projects.make(root, SCRIPT_DUMP="0")
    clock = SimulatedClock()

    class Both(SimulatedClock):
        def sleep(self, seconds: float) -> None:
            time.sleep(0.001)
            self.seconds += seconds

    clock = Both()
    with pytest.raises(TargetError, match="does not come"):
        wait_then_open(root, clock)
    assert projects.processes_of(root) == set()


def wait_then_open(root: Path, clock: SimulatedClock) -> Servers:
    return projects.open_servers(root, clock=clock)


def test_a_canary_that_fails_ends_the_server(root: Path) -> None:
    projects.make(root)

    def canary(server: Server) -> None:
        raise TargetError("states of layer 3 where layer 2 was expected")

    with pytest.raises(TargetError, match="layer 3"):
        projects.open_servers(root, canary=canary)
    assert projects.processes_of(root) == set()


def test_a_killed_server_is_noticed_and_restarted(root: Path) -> None:
    projects.make(root)
    with projects.open_servers(root) as servers:
        first = servers.servers[0]
        assert first.pid is not None
        assert first.dump_dir is not None
        (first.dump_dir / "attempt1-abc.dump").write_bytes(b"left")
        os.kill(first.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while servers.alive() == [True] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert servers.alive() == [False]
        servers.restart(0)
        second = servers.servers[0]
        assert servers.alive() == [True]
        assert second.pid != first.pid
        assert second.dump_dir != first.dump_dir
        assert not first.dump_dir.exists()
        assert first.log != second.log
        assert first.log is not None
        assert first.log.is_file()
    assert projects.processes_of(root) == set()


def test_a_server_that_fails_its_health_is_not_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projects.make(root)
    with projects.open_servers(root) as servers:
        for answer, alive in (("silent", True), ("failing", False), ("refused", False), ("ok", True)):
            monkeypatch.setattr(Address, "health", lambda *_, answer=answer: answer)
            assert servers.alive() == [alive]


def orphan(root: Path, mode: str, keep: bool = False) -> str:
    """A server whose eyas was killed: a child opens it and ends without closing."""
    pid = os.fork()
    if pid == 0:
        try:
            servers = projects.open_servers(root, mode, keep=keep)
            (root / "url").write_text(servers.urls[0])
            if servers.dump_dirs[0] is not None:
                (servers.dump_dirs[0] / "attempt1-unclaimed.dump").write_bytes(b"states")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return (root / "url").read_text()


def test_a_server_left_by_a_killed_run_is_adopted_after_the_same_proof(root: Path) -> None:
    projects.make(root)
    url = orphan(root, "capture")
    seen: list[str] = []
    with projects.open_servers(root, "capture", canary=lambda server: seen.append(server.url)) as servers:
        assert servers.urls == [url] == seen
        assert servers.dump_dirs[0] is not None
        assert list(servers.dump_dirs[0].glob("*.dump")) == []  # nobody waits for what was left
        assert servers.alive() == [True]
    assert projects.processes_of(root) == set()


def test_of_more_servers_than_are_wanted_the_rest_is_stopped(root: Path) -> None:
    projects.make(root, serve="replicas = 3")
    orphan(root, "generate")
    assert len(projects.processes_of(root)) == 3
    text = (root / "eyas.toml").read_text()
    (root / "eyas.toml").write_text(text.replace("replicas = 3", "replicas = 1"))
    with projects.open_servers(root, "generate") as servers:
        assert len(servers.urls) == 1
        assert len(projects.processes_of(root)) == 1
    assert projects.processes_of(root) == set()


def test_a_server_left_in_another_mode_is_stopped_first(root: Path) -> None:
    projects.make(root)
    url = orphan(root, "capture")
    with projects.open_servers(root, "generate") as servers:
        assert servers.urls != [url]
        assert not answers(url)
        assert len(projects.processes_of(root)) == 1


def test_a_kept_server_is_used_and_left_running(root: Path) -> None:
    projects.make(root)
    url = orphan(root, "generate", keep=True)
    with projects.open_servers(root, "generate") as servers:
        assert servers.urls == [url]
    assert answers(url)
    with pytest.raises(TargetError, match="mode generate runs already") as caught:
        projects.open_servers(root, "capture")
    assert caught.value.hint == "eyas serve stop"
    assert answers(url)


def test_somebody_elses_server_is_proven_and_never_stopped(root: Path, tmp_path: Path) -> None:
    projects.make(root, SCRIPT_KEY="secret")
    os.environ["SCRIPT_TEST_KEY"] = "secret"
    try:
        text = (root / "eyas.toml").read_text()
        (root / "eyas.toml").write_text(
            text.replace("[serve]\n", '[serve]\napi_key_env = "SCRIPT_TEST_KEY"\n')
        )
        with projects.open_servers(root, "capture") as owned:
            other = projects.make(tmp_path / "other", serve=f'urls = ["{owned.urls[0]}/"]')
            with pytest.raises(EyasError, match="answers 401"):
                projects.open_servers(other, "capture")
            text = (other / "eyas.toml").read_text()
            (other / "eyas.toml").write_text(
                text.replace("[serve]\n", '[serve]\napi_key_env = "SCRIPT_TEST_KEY"\n')
            )
            with projects.open_servers(other, "capture") as foreign:
                assert foreign.urls == owned.urls
                assert foreign.dump_dirs == owned.dump_dirs
                assert not foreign.servers[0].ours
                foreign.restart(0)
            assert owned.alive() == [True]
            with pytest.raises(TargetError, match="not in mode generate"):
                projects.open_servers(other, "generate")
    finally:
        del os.environ["SCRIPT_TEST_KEY"]


def test_a_key_that_is_not_set(root: Path) -> None:
    projects.make(root, serve='api_key_env = "NO_SUCH_VARIABLE"')
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE is not set"):
        projects.open_servers(root)


def test_health_waits_no_longer_than_it_is_told() -> None:
    clock = SimulatedClock()
    assert not wait_healthy(Address("http://127.0.0.1:9"), 30, clock, StopFlag(), lambda: None)
    assert 30 <= clock.now() <= 31
