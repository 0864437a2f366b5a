"""Projects whose servers are the scripted engine, and the processes they leave."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil

from eyas.base.files import write_json
from eyas.base.process import is_running
from eyas.config.load import load_config
from eyas.config.schema import EyasConfig
from eyas.targets.serving.manager import Mode, Servers

SCRIPTED = Path(__file__).with_name("scripted.py")

CONFIG = """
format = 1
[target]
model = "target"
kind = "{engine}"
[data]
max_seq_len = 128
[[data.sources]]
path = "chat.jsonl"
[regenerate]
max_new_tokens = 16
[serve]
command = ["{python}", "{scripted}"]
dump_dir = "dumps"
start_seconds = 60
stop_seconds = {stop_seconds}
{serve}
[serve.environment]
TEST_ROOT = "{root}"
{environment}
"""


def make(
    root: Path, engine: str = "vllm", *, serve: str = "", stop_seconds: float = 20, **environment: str
) -> Path:
    """A project in ``root``; ``environment`` makes the scripted engine misbehave."""
    target = root / "target"
    target.mkdir(parents=True, exist_ok=True)
    write_json(
        target / "config.json",
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 30,
            "vocab_size": 1000,
            "num_attention_heads": 4,
        },
    )
    lines = "\n".join(f'{key} = "{value}"' for key, value in environment.items())
    text = CONFIG.format(
        engine=engine, python=sys.executable, scripted=SCRIPTED, root=root, stop_seconds=stop_seconds,
        serve=serve, environment=lines,
    )  # fmt: skip
    (root / "eyas.toml").write_text(text)
    return root


def config(root: Path) -> EyasConfig:
    return load_config(root)


def open_servers(root: Path, mode: Mode = "capture", **options: Any) -> Servers:
    return Servers.open(load_config(root), root, mode, log_folder=root / "logs" / "test", **options)


def processes_of(root: Path) -> set[int]:
    """Every process that carries this project's mark in its environment, found without eyas' help."""
    mark = f"TEST_ROOT={root}".encode()
    found = set()
    for pid in psutil.pids():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and is_running(pid):
                found.add(pid)
        except OSError:
            continue
    return found - {os.getpid()}


def end_all(root: Path) -> None:
    """Kill whatever a failed test has left."""
    for pid in processes_of(root):
        os.kill(pid, 9)
