"""What remedies work with: the scene, permissions, the project's lock, and who is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from eyas.hosts.declared import declared, open_host
from eyas.hosts.host import Host
from eyas.pipeline.lock import hold_lock
from eyas.recovery.doctor import diagnose
from eyas.recovery.findings import Finding
from eyas.recovery.scene import Scene
from eyas.store.ledger import Ledger
from eyas.store.repair import open_or_rebuild

_START_SECONDS = 180.0


def start_in_background(root: Path, options: Sequence[str]) -> str:
    """``eyas run --detach``, which outlives this process. Raises subprocess.SubprocessError."""
    result = subprocess.run(
        [sys.executable, "-m", "eyas", "run", "--project", str(root), *options, "--detach"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_START_SECONDS,
    )
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        return f"exit code {result.returncode}: {' '.join(lines[:4])}"
    return "started in the background"


@dataclass
class Bench:
    """The tools of one recovery.

    Attributes:
        scene: the latest look; `look` replaces it.
        may_stop_services: the person said so on the command line.
        say: one line for the person.
        point: called by name at every step of the work; tests cut the process off there.
        resume_words: options of the run that is resumed.
        baseline_stored: samples that were stored when the run was resumed.
        start_run: starts it for a project folder; returns what happened, in words.
    """

    scene: Scene
    may_stop_services: bool = False
    say: Callable[[str], None] = lambda text: None
    point: Callable[[str], None] = lambda name: None
    resume_words: Sequence[str] = ()
    release: Callable[[], None] = lambda: None
    attach: Callable[[Ledger], None] = lambda ledger: None
    start_run: Callable[[Path, Sequence[str]], str] = start_in_background
    baseline_stored: int = field(default=0)

    def look(self) -> Scene:
        """A fresh scene."""
        self.scene = self.scene.again()
        return self.scene

    def num_stored(self) -> int:
        """Samples that the ledger says are stored, or released since; 0 without one."""
        with self.scene.ledger() as ledger:
            return 0 if ledger is None else ledger.num_captured()

    def still(self, keys: Iterable[str], checks: Iterable[str]) -> list[Finding]:
        """Which findings a fresh look of these checks still has, by their keys."""
        wanted = set(keys)
        return [f for f in diagnose(self.look(), checks).findings if f.key in wanted]

    @contextmanager
    def writing(self) -> Iterator[Ledger]:
        """The project's lock and its ledger (rebuilt when lost), for a remedy that changes the store."""
        layout = self.scene.layout
        with hold_lock(layout.state, "recover"):
            ledger, _ = open_or_rebuild(layout)
            with ledger:
                yield ledger

    def container_host(self) -> Host | None:
        """The machine that this one's container runs on, when eyas.toml names it."""
        name = self.scene.project.config.recovery.container_host
        return None if name is None else open_host(declared(self.scene.project.config, name))


@dataclass(frozen=True)
class Proof:
    """Whether a todo's goal is reached, and what shows it."""

    done: bool
    evidence: str


@dataclass(frozen=True)
class Way:
    """One way to reach a goal; ``act`` returns what it did."""

    name: str
    act: Callable[[], str]


class Remedy(Protocol):
    """Mends findings of one kind."""

    def blocked(self, bench: Bench) -> str | None:
        """Why it may not or cannot be done now, with the command that lifts it; None when it can."""
        ...

    def ways(self, bench: Bench) -> Sequence[Way]:
        """Ways in the order in which they are tried, each only while the proof fails."""
        ...

    def proof(self, bench: Bench) -> Proof:
        """The verification; reads, changes nothing."""
        ...
