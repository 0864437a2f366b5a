"""The real SGLang on a CPU, with eyas' plugin: its dumps and its failures. Needs ``make servers``."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from eyas.config.load import load_config
from eyas.targets.serving.manager import Server, Servers
from eyas.targets.serving.speculation import speculates
from tests.targets.serving import engines
from tests.targets.serving.reference import ReferenceModel, check_dump, prompts, read_dump

pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]

TOLERANCE = 1e-3
"""Both compute in float32; a neighbouring layer is at least 0.04 away."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = engines.make_project(
        tmp_path_factory.mktemp("sglang") / "project", "sglang", 'dump_dir = "dumps"\ndump_limit = "1GB"'
    )
    with Servers.open(load_config(root), root, "capture", log_folder=root / "logs") as opened:
        pids = [opened.servers[0].pid]
        yield opened
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


@pytest.fixture
def server(servers: Servers) -> Server:
    return servers.servers[0]


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(engines.real_target())


def generate(server: Server, tokens: list[int], name: object = None, count: int = 1) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling}
    if name is not None:
        sampling["custom_params"] = {"eyas_name": name}
        body |= {"rid": str(name), "extra_key": str(name)}
    return dict(server.address.json("/generate", body, timeout=900))


def said(reply: dict[str, Any]) -> dict[str, Any]:
    (text,) = reply["meta_info"]["eyas"]
    return dict(json.loads(text))


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


def test_dumps_are_the_states_that_transformers_computes(server: Server, model: ReferenceModel) -> None:
    all_prompts = prompts()
    names = [new_name() for _ in all_prompts]
    plain = [tokens[: 5 + 3 * i] for i, tokens in enumerate(all_prompts[:4])]
    with ThreadPoolExecutor(16) as pool:
        # these decode while the others are prefilled, in the same batches
        others = [pool.submit(generate, server, tokens, count=16) for tokens in plain]
        asked = [pool.submit(generate, server, t, n) for t, n in zip(all_prompts, names, strict=True)]
        replies = [future.result() for future in asked]
        plain_replies = [future.result() for future in others]
    for tokens, name, reply in zip(all_prompts, names, replies, strict=True):
        told = said(reply)
        assert told == {
            "protocol": 1, "name": name, "rows": len(tokens), "dir": str(server.dump_dir),
            "layers": [2, 15, 27], "last": "after-norm", "engine": told["engine"],
        }  # fmt: skip
        assert told["engine"].startswith("sglang ")
        path = arrived(server, name)
        assert path.suffix == ".dump", path.read_text()
        check_dump(read_dump(path), tokens, model(tokens), name, TOLERANCE)
        path.unlink()
    for tokens, reply in zip(plain, plain_replies, strict=True):
        assert "eyas" not in reply["meta_info"] or reply["meta_info"]["eyas"] in ([], [None] * 16)
        wanted, gap = model.answer(tokens, 16)
        if gap > 1e-3:  # nearer than that, two ways of adding up may choose differently
            assert reply["output_ids"] == wanted
    assert server.dump_dir is not None
    assert [p.name for p in server.dump_dir.iterdir()] == ["eyas-owner.json"]


def test_a_write_that_fails_is_told(server: Server) -> None:
    assert server.dump_dir is not None
    name = new_name()
    blocked = server.dump_dir / f"{name}.tmp"
    blocked.mkdir()  # whatever the server writes first cannot be written
    assert "error" not in said(generate(server, prompts()[0], name))
    path = arrived(server, name)
    assert path.suffix == ".err"
    assert "FileExistsError" in json.loads(path.read_text())["why"]
    blocked.rmdir()
    path.unlink()
    name = new_name()
    generate(server, prompts()[0], name)
    path = arrived(server, name)
    assert path.suffix == ".dump"
    path.unlink()


def test_what_is_known_beforehand_is_in_the_reply(servers: Servers, server: Server) -> None:
    assert server.dump_dir is not None
    tokens = prompts()[0]
    for name in ("../outside-x", "x", "UPPER-CASE", 7):
        assert said(generate(server, tokens, name))["error"].startswith("bad-name: ")
    full = server.dump_dir / "test-that-fills-the-folder.dump"
    with open(full, "wb") as file:
        file.truncate(800_000_000)  # 80% of serve.dump_limit
    assert said(generate(server, tokens, new_name()))["error"].startswith("full: ")
    full.unlink()
    name = new_name()
    assert "error" not in said(generate(server, tokens, name))
    arrived(server, name).unlink()
    assert not speculates(server.address, "sglang")
    assert servers.alive() == [True]
