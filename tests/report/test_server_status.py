"""Servers in status: from records and the process table alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eyas.base.process import ProcessIdentity
from eyas.report.status import project_status
from eyas.stages.project import Project
from eyas.targets.serving.records import ServerBook, ServerRecord
from tests.cli.command import eyas
from tests.report.test_status import look


def record(index: int, process: ProcessIdentity, **changes: Any) -> ServerRecord:
    values: dict[str, Any] = {
        "index": index, "engine": "vllm", "mode": "capture", "host": "127.0.0.1", "port": 4000 + index,
        "model": "m", "digest": "d", "marker": f"marker-{index}", "process": process, "opened_by": process,
        "dump_dir": None, "log": "server.log", "started": "2026-11-30T07:00:00.000Z", "keep": False,
        "ready": True,
    }  # fmt: skip
    return ServerRecord(**(values | changes))


def ended_process() -> ProcessIdentity:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return ProcessIdentity.of(child.pid)


def test_no_server_and_no_list_of_them(fresh: Path) -> None:
    assert look(fresh)["servers"] == []
    assert "servers" not in eyas("status", "--project", fresh).out


def test_each_state_from_records(fresh: Path, tmp_path: Path) -> None:
    here, gone = ProcessIdentity.of(os.getpid()), ended_process()
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for name in ("a.dump", "b.dump", "c.tmp", "eyas-owner.json"):
        (dumps / name).touch()
    book = ServerBook(fresh / "state" / "servers.json")
    book.put(record(0, here, dump_dir=str(dumps)))
    book.put(record(1, here, ready=False, opened_by=gone))
    book.put(record(2, gone))
    book.put(record(3, here, opened_by=gone, keep=True, mode="generate"))
    found = look(fresh)["servers"]
    assert [(s["state"], s["used_by"], s["num_dumps"]) for s in found] == [
        ("running", os.getpid(), 2),
        ("starting", None, 0),
        ("ended", None, 0),
        ("running", None, 0),
    ]
    shown = [line[12:] for line in eyas("status", "--project", fresh).out.splitlines()]
    at = shown.index(
        f"0 vllm capture running at http://127.0.0.1:4000, process {os.getpid()}, "
        f"used by process {os.getpid()}, 2 dumps wait"
    )
    assert shown[at + 1 : at + 4] == [
        f"1 vllm capture starting at http://127.0.0.1:4001, process {os.getpid()}",
        "2 vllm capture has ended by itself",
        f"3 vllm generate running at http://127.0.0.1:4003, process {os.getpid()}, "
        "kept until eyas serve stop",
    ]


def test_servers_of_others_are_named_and_not_asked(fresh: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with open(fresh / "eyas.toml", "a") as config:
            config.write(f'[serve]\nurls = ["{url}"]\nlast_urls = ["{url}/last"]\nengine = "sglang"\n')
        started = time.monotonic()
        status = project_status(Project.open(fresh))
        assert time.monotonic() - started < 5
        silent.settimeout(0.1)
        try:
            silent.accept()
            asked = True
        except TimeoutError:
            asked = False
    assert not asked
    assert [(s.state, s.engine, s.url, s.pid) for s in status.servers] == [
        ("foreign", "sglang", url, None),
        ("foreign", "sglang", f"{url}/last", None),
    ]
    assert f"servers     {url}, somebody else's" in eyas("status", "--project", fresh).out


def test_a_damaged_list_is_a_problem_and_not_an_end(fresh: Path) -> None:
    (fresh / "state").mkdir(exist_ok=True)
    (fresh / "state" / "servers.json").write_text("{}")
    status = look(fresh)
    assert status["servers"] == []
    assert any(
        problem.startswith("servers: the list of servers is damaged") for problem in status["problems"]
    )
