"""GPUs through the real nvidia-ml-py on a library that plays the driver, and through nvidia-smi."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.hosts.gpus import GpuUser, SmiGpus
from eyas.hosts.host import Result
from tests.hosts.driver import build_driver
from tests.recovery.machine import FakeHost

ASK = """
import json
from dataclasses import asdict
from eyas.hosts.gpus import NvmlGpus
try:
    found = NvmlGpus().read()
    print(json.dumps(None if found is None else [asdict(gpu) for gpu in found]))
except OSError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library."""
    return build_driver(tmp_path_factory.mktemp("nvml"))


def ask(folder: Path | None, **environment: str) -> Any:
    path = {"LD_LIBRARY_PATH": str(folder)} if folder is not None else {}
    words = [sys.executable, "-c", ASK]
    env = {**os.environ, **path, **environment}
    return json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)


def test_memory_and_processes_come_from_the_driver(driver: Path) -> None:
    gpus = ask(driver, FAKE_GPUS="80000:75800:4242;80000:100:0")
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    assert gpus[0] == {
        "index": 0,
        "name": "fake H100",
        "total_bytes": 80_000_000_000,
        "used_bytes": 75_800_000_000,
        "busy_percent": 0,
        "users": [{"pid": 4242, "used_bytes": 75_800_000_000}],
    }
    assert gpus[1]["users"] == []


def test_a_driver_that_fails_is_an_error_and_none_is_none(driver: Path, tmp_path: Path) -> None:
    assert "lost" in ask(driver, FAKE_GPUS="80000:1:0", FAKE_GPUS_ERROR="1")
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    assert ask(None) is None


METER = """
from eyas.cli.progress import LineProgress
lines = LineProgress("extract")
lines.start("capture", total=10, unit="samples")
lines.advance(10)
"""


def shown(folder: Path | None, **environment: str) -> str:
    """The last line of progress in a process whose driver is the library."""
    path = {"LD_LIBRARY_PATH": str(folder)} if folder is not None else {}
    words, env = [sys.executable, "-c", METER], {**os.environ, **path, **environment}
    said = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stderr
    return said.splitlines()[-1]


def test_progress_says_how_busy_the_gpus_are(driver: Path) -> None:
    one = shown(driver, FAKE_GPUS="80000:42100:4242:87")
    assert one.endswith(", GPU 87% 42.1 GB of 80.0 GB")
    two = shown(driver, FAKE_GPUS="80000:60000:4242:90;80000:20000:0:41")
    assert two.endswith(", GPU 66% 80.0 GB of 160.0 GB")  # the mean of 90 and 41 is 65.5


def test_progress_says_nothing_of_gpus_that_are_not_there_or_silent(driver: Path) -> None:
    assert "GPU" not in shown(driver, FAKE_GPUS="")
    assert "GPU" not in shown(driver, FAKE_GPUS="80000:1:0", FAKE_GPUS_ERROR="1")
    if not shutil.which("nvidia-smi"):
        assert "GPU" not in shown(None)


def test_nvidia_smi_of_another_machine() -> None:
    host = FakeHost()
    out = {
        "gpu": "0, GPU-a, NVIDIA H200, 143771, 77619, 0\n1, GPU-b, NVIDIA H200, 143771, 4, 93\n",
        "apps": "GPU-a, 4242, 77610\n",
    }
    host.commands["nvidia-smi"] = lambda argv: Result(
        tuple(argv), 0, out["apps" if "compute-apps" in argv[1] else "gpu"], "", 0.0
    )
    first, second = SmiGpus(host).read() or []
    assert first.users == (GpuUser(4242, 77610 * 2**20),)
    assert (first.total_bytes, first.used_bytes) == (143771 * 2**20, 77619 * 2**20)
    assert (second.users, second.busy_percent) == ((), 93)
    host.commands["nvidia-smi"] = lambda argv: Result(tuple(argv), 127, "", "not found", 0.0)
    assert SmiGpus(host).read() is None
