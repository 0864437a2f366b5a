"""What remedies work with: the scene, permissions, the project's lock, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from eyas.hosts.declared import declared, open_host
from eyas.hosts.host import Host
from eyas.pipeline.lock import hold_lock
from eyas.recovery.doctor import diagnose
from eyas.recovery.findings import Finding
from eyas.recovery.scene import Scene
from eyas.store.ledger import Ledger
from eyas.store.repair import open_or_rebuild


@dataclass
class Bench:
    """The tools of one recovery.

    Attributes:
        scene: the latest look; `look` replaces it.
        may_stop_services: the person said so on the command line.
        say: one line for the person.
        point: called by name at every step of the work; tests cut the process off there.
        resume_words: the command that resumes the run, without the program's name.
    """

    scene: Scene
    may_stop_services: bool = False
    say: Callable[[str], None] = lambda text: None
    point: Callable[[str], None] = lambda name: None
    resume_words: Sequence[str] = ()
    release: Callable[[], None] = lambda: None
    attach: Callable[[Ledger], None] = lambda ledger: None
    baseline_stored: int = field(default=0)

    def look(self) -> Scene:
        """A fresh scene."""
        self.scene = self.scene.again()
        return self.scene

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
