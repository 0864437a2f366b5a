"""The world that faults are planted in, and the table of these."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.recovery.machine import FakeGpus, FakeHost

UNIT = "vllm-kimi-k25-int4.service"


@dataclass
class World:
    """A copy of the finished project on its own machine."""

    root: Path
    host: FakeHost = field(default_factory=FakeHost)
    gpus: FakeGpus = field(default_factory=FakeGpus)
    options: dict[str, Any] = field(default_factory=dict)

    def segment(self, number: int = 0) -> Path:
        return sorted((self.root / "store" / "segments").glob("*.safetensors"))[number]

    def checkpoint(self) -> Path:
        return sorted((self.root / "drafter" / "checkpoints").glob("step-*"))[-1]

    def sql(self, *statements: str) -> None:
        with sqlite3.connect(self.root / "state" / "ledger.db") as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    def configure(self, old: str, new: str) -> None:
        path = self.root / "eyas.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, offset: int = -100) -> None:
    """Flip one bit, counted from the end when negative; size and time stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(bytes(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def last_event(root: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change (or drop: None) the last event of the newest attempt."""
    path = sorted((root / "logs").glob("attempt-*"))[-1] / "events.jsonl"
    lines = path.read_text().splitlines()
    event = change(json.loads(lines[-1]))
    path.write_text("\n".join(lines[:-1] + ([json.dumps(event)] if event else [])) + "\n")


def process_in(host: FakeHost, pid: int, path: str) -> None:
    host.files[f"/proc/{pid}/cgroup"] = f"0::{path}\n"


EXITS = {"disk-full": 12, "inodes-short": 12, "server-unreachable": 13, "server-silent": 13}
FAULTS: dict[str, tuple[str, Callable[[World], object]]] = {}


def fault(code: str) -> Callable[[Callable[[World], object]], Callable[[World], object]]:
    def note(plant: Callable[[World], object]) -> Callable[[World], object]:
        FAULTS[plant.__name__] = (code, plant)
        return plant

    return note
