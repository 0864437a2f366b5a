"""The real vLLM on a CPU: its dumps, its failures, its life cycle. Needs ``make servers``."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from eyas.config.load import load_config
from eyas.config.target_facts import read_target_facts
from eyas.targets.serving.address import Address
from eyas.targets.serving.manager import Server, Servers
from eyas.targets.serving.speculation import read_speculation
from tests.cli.command import eyas
from tests.export import make
from tests.targets.serving import engines
from tests.targets.serving.reference import ReferenceModel, check_dump, prompts, read_dump

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]

TOLERANCE = 1e-3
"""Both compute in float32; a neighbouring layer is at least 0.04 away."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project whose capturing server was started by ``eyas serve start`` and runs."""
    root = engines.make_project(
        tmp_path_factory.mktemp("vllm") / "project", "vllm", 'dump_dir = "dumps"\ndump_limit = "1GB"'
    )
    started = eyas("serve", "start", "--mode", "capture", "--project", root, "--json")
    try:
        assert started.code == 0, started.out + started.err
        yield root
    finally:
        stopped = eyas("serve", "stop", "--project", root, "--json")
        assert stopped.code == 0, stopped.out


@pytest.fixture
def server(project: Path) -> Iterator[Server]:
    """The running server, adopted as `run` would after the same proof."""
    with Servers.open(load_config(project), project, "capture", log_folder=project / "logs") as servers:
        yield servers.servers[0]


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(engines.real_target())


def complete(server: Server, tokens: list[int], name: object = None, max_tokens: int = 1) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    if name is not None:
        body["kv_transfer_params"] = {"eyas": {"name": name}}
    return dict(server.address.json("/v1/completions", body, timeout=900))


def new_name() -> str:
    return f"test-{uuid.uuid4().hex}"


def arrived(server: Server, name: str) -> Path:
    """The dump, or the error file, whichever comes."""
    assert server.dump_dir is not None
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for suffix in (".dump", ".err"):
            path = server.dump_dir / (name + suffix)
            if path.exists():
                return path
        time.sleep(0.05)
    raise AssertionError(f"{name} never came")


def test_status_tells_of_the_running_server(project: Path) -> None:
    (told,) = eyas("serve", "status", "--project", project, "--json").json["servers"]
    assert (told["engine"], told["mode"], told["state"], told["kept"]) == ("vllm", "capture", "running", True)
    assert psutil.pid_exists(told["pid"])
    logged = eyas("serve", "logs", "--lines", "5", "--project", project, "--json").json
    assert len(logged["lines"]) == 5


def test_dumps_are_the_states_that_transformers_computes(server: Server, model: ReferenceModel) -> None:
    all_prompts = prompts()
    names = [new_name() for _ in all_prompts]
    plain = [tokens[: 5 + 3 * i] for i, tokens in enumerate(all_prompts)]
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(complete, server, t, n) for t, n in zip(all_prompts, names, strict=True)]
        others = [pool.submit(complete, server, tokens) for tokens in plain]
        replies = [future.result() for future in asked]
        plain_replies = [future.result() for future in others]
    for tokens, name, reply in zip(all_prompts, names, replies, strict=True):
        said = reply["kv_transfer_params"]["eyas"]
        assert said == {
            "protocol": 1, "name": name, "rows": len(tokens), "dir": str(server.dump_dir),
            "layers": [2, 15, 27], "last": "before-norm", "engine": said["engine"],
        }  # fmt: skip
        assert said["engine"].startswith("vllm ")
        path = arrived(server, name)
        assert path.suffix == ".dump", path.read_text()
        check_dump(read_dump(path), tokens, model(tokens), name, TOLERANCE)
        path.unlink()
    for tokens, reply in zip(plain, plain_replies, strict=True):
        assert not reply.get("kv_transfer_params")
        assert reply["choices"][0]["token_ids"] == [model(tokens).next_token]
    assert server.dump_dir is not None
    assert [p.name for p in server.dump_dir.iterdir()] == ["eyas-owner.json"]


def test_a_write_that_fails_is_told(server: Server) -> None:
    assert server.dump_dir is not None
    name = new_name()
    blocked = server.dump_dir / f"{name}.tmp"
    blocked.mkdir()  # whatever the server writes first cannot be written
    reply = complete(server, prompts()[0], name)
    assert "error" not in reply["kv_transfer_params"]["eyas"]  # it left before the write
    path = arrived(server, name)
    assert path.suffix == ".err"
    assert "FileExistsError" in json.loads(path.read_text())["why"]
    blocked.rmdir()
    path.unlink()
    name = new_name()
    complete(server, prompts()[0], name)
    path = arrived(server, name)
    assert path.suffix == ".dump"
    path.unlink()


def test_what_is_known_beforehand_is_in_the_reply(server: Server) -> None:
    assert server.dump_dir is not None
    tokens = prompts()[0]
    for name in ("../outside-x", "x", "UPPER-CASE", 7, None):
        body = {"model": server.model, "prompt": tokens, "max_tokens": 1}
        body["kv_transfer_params"] = {"eyas": {"name": name}}
        said = server.address.json("/v1/completions", body, 600)["kv_transfer_params"]["eyas"]
        assert said["error"].startswith("bad-name: ")
    full = server.dump_dir / "test-that-fills-the-folder.dump"
    with open(full, "wb") as file:
        file.truncate(800_000_000)  # 80% of serve.dump_limit
    said = complete(server, tokens, new_name())["kv_transfer_params"]["eyas"]
    assert said["error"].startswith("full: ")
    full.unlink()
    name = new_name()
    assert "error" not in complete(server, tokens, name)["kv_transfer_params"]["eyas"]
    arrived(server, name).unlink()
    assert [p.name for p in server.dump_dir.iterdir()] == ["eyas-owner.json"]


def test_the_killed_engine_core_is_noticed(project: Path) -> None:
    servers = Servers.open(load_config(project), project, "capture", log_folder=project / "logs")
    leader = psutil.Process(servers.servers[0].pid)
    cores = [p for p in leader.children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert len(cores) == 1
    assert servers.alive() == [True]
    os.kill(cores[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while servers.alive() == [True] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert servers.alive() == [False]
    servers.close()
    (told,) = eyas("serve", "stop", "--project", project, "--json").json["stopped"]
    assert told["gpu"].startswith(("released", "not checked"))
    assert not leader.is_running()
    assert eyas("serve", "status", "--project", project, "--json").json["servers"] == []
    assert list((project / "dumps").rglob("eyas-owner.json")) == []


def test_an_exported_drafter_is_served_and_counted(tmp_path: Path, model: ReferenceModel) -> None:
    root = engines.make_project(tmp_path / "project", "vllm")
    target = read_target_facts(engines.real_target())
    make.write(
        root / "exports" / "eagle3", aux_layers=target.default_aux_layers(), target=target,
        hidden_size=576, target_hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
        head_dim=64, draft_vocab_size=512, target_vocab_size=49152,
    )  # fmt: skip
    with Servers.open(
        load_config(root), root, "draft", log_folder=root / "logs", drafter=root / "exports" / "eagle3"
    ) as servers:
        server = servers.servers[0]
        address = Address(server.url)
        before = read_speculation(address)
        asked = [tokens[:20] for tokens in prompts()[1:4]]
        replies = [complete(server, tokens, max_tokens=12) for tokens in asked]
        counted = read_speculation(address).since(before)
        for tokens, reply in zip(asked, replies, strict=True):
            wanted, gap = model.answer(tokens, 12)
            if gap > 1e-3:  # nearer than that, two ways of adding up may choose differently
                assert reply["choices"][0]["token_ids"] == wanted
        # every token beyond the first of an answer came from a round: one sure token and the accepted
        num_emitted = sum(len(reply["choices"][0]["token_ids"]) - 1 for reply in replies)
        assert counted.rounds > 0
        assert counted.rounds <= num_emitted <= counted.rounds + counted.accepted + 3 * len(asked)
        assert len(counted.accepted_at) == 3
        assert sum(counted.accepted_at) == counted.accepted
        assert 1 <= counted.acceptance_length <= 4
