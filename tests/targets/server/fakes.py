"""Fake servers over one tiny target, and a keeper for servers that a test runs itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eyas.targets.fake.dumps import TinyModel
from eyas.targets.fake.faults import parse_fault
from eyas.targets.fake.server import FakeServer
from eyas.targets.fake.settings import FakeSettings
from eyas.targets.local.model import LocalTarget

Engine = Literal["vllm", "sglang"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang")


@dataclass
class Known:
    """A server as a keeper describes it."""

    engine: Engine
    url: str
    dump_dir: Path | None
    model: str = ""
    ours: bool = False
    last_url: str = ""


@dataclass
class FixedKeeper:
    """Servers that run already; `restart` does what the test says."""

    servers: list[Any]
    on_restart: Callable[[int], None] | None = None
    on_alive: Callable[[], list[bool]] | None = None
    restarts: list[int] = field(default_factory=list)

    def alive(self) -> list[bool]:
        return self.on_alive() if self.on_alive else [True] * len(self.servers)

    def restart(self, index: int) -> None:
        self.restarts.append(index)
        if self.on_restart is not None:
            self.on_restart(index)

    def __enter__(self) -> FixedKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def tiny_server_model(target: LocalTarget, engine: Engine, layers: Sequence[int]) -> TinyModel:
    return TinyModel(target, layers, before_norm=engine == "vllm")


@contextmanager
def fake_server(
    model: TinyModel,
    folder: Path,
    engine: Engine,
    dumps: Path | None,
    faults: Sequence[str] = (),
    **more: Any,
) -> Iterator[FakeServer]:
    """A running fake server; ended also when the test fails."""
    if dumps is not None:
        dumps.mkdir(parents=True, exist_ok=True)
    settings = FakeSettings(
        engine=engine,
        mode="capture" if dumps is not None or more.get("returns") else "generate",
        model_folder=folder,
        dump_folder=dumps,
        faults=tuple(parse_fault(fault) for fault in faults),
        **more,
    )
    server = FakeServer(model, settings)
    try:
        yield server
    finally:
        server.close()


def keeper_of(*servers: FakeServer) -> FixedKeeper:
    return FixedKeeper([Known(s.settings.engine, s.url, s.settings.dump_folder) for s in servers])
