"""What all checks of one look share: the project, the machine, and what was read of it already."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.base.errors import DamageFound, EyasError, StoreNotMounted
from eyas.base.layout import Layout
from eyas.base.progress import Progress, SilentProgress
from eyas.hosts.disks import Filesystem, filesystem_of
from eyas.hosts.gpus import Gpu, GpuReader, NvmlGpus, SmiGpus
from eyas.hosts.host import Here, Host
from eyas.hosts.processes import ProcessInfo, list_processes
from eyas.pipeline.attempt import runs
from eyas.pipeline.lock import Holder, current_holder
from eyas.pipeline.verify import Verification, verify_project
from eyas.stages.digests import DigestCache
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from eyas.store.place import require_place
from eyas.targets.serving.records import ServerBook


@dataclass(frozen=True)
class LastAttempt:
    """The newest attempt that did the pipeline's work."""

    name: str
    verb: str
    started_at: str
    last_event_at: str
    outcome: str | None


@dataclass
class Scene:
    """One look; facts are read once and kept. A new look needs a new scene (`again`).

    Attributes:
        host: where the machine's facts come from; project files are read in this process.
        deep: hash everything that can be hashed.
        now: seconds since the epoch.
    """

    project: Project
    host: Host = field(default_factory=Here)
    gpus: GpuReader | None = None
    deep: bool = False
    now: Callable[[], float] = time.time
    progress: Progress = field(default_factory=SilentProgress)

    def __post_init__(self) -> None:
        if self.gpus is None:
            self.gpus = NvmlGpus() if self.host.is_here else SmiGpus(self.host)
        # a look must not write the cache of digests either
        self.project.__dict__["digests"] = DigestCache(self.layout.state / "digests.json", writable=False)

    def again(self, *, deep: bool = False) -> Scene:
        """A fresh look at the same project and machine, configuration included."""
        project = Project(self.project.layout, self.project.config, self.project.overrides)
        return Scene(project, self.host, self.gpus, deep, self.now, self.progress)

    @property
    def layout(self) -> Layout:
        return self.project.layout

    @property
    def root(self) -> str:
        return str(self.layout.root)

    @cached_property
    def gpu_list(self) -> list[Gpu] | None:
        """All GPUs; None without a driver. Raises OSError when the driver does not answer."""
        assert self.gpus is not None
        return self.gpus.read()

    @cached_property
    def processes(self) -> dict[int, ProcessInfo]:
        """All processes of the machine by their number."""
        return {process.pid: process for process in list_processes(self.host)}

    @cached_property
    def holder(self) -> Holder | None:
        """Who writes to the project now."""
        return current_holder(self.layout.state)

    @cached_property
    def own_pids(self) -> frozenset[int]:
        """The writer, this process, this project's servers, and what they started; none elsewhere."""
        if not self.host.is_here:
            return frozenset()
        roots = {os.getpid()} | ({self.holder.pid} if self.holder is not None else set())
        with contextlib.suppress(DamageFound):  # a finding of its own
            roots |= {r.process.pid for r in ServerBook(self.layout.servers).read() if r.process.alive}
        found = set(roots)
        while True:
            more = {p.pid for p in self.processes.values() if p.ppid in found} - found
            if not more:
                return frozenset(found)
            found |= more

    @cached_property
    def boot(self) -> str:
        """Identity of the machine's boot; ``unknown`` where it has none."""
        with contextlib.suppress(OSError):
            return self.host.read_text("/proc/sys/kernel/random/boot_id").strip()
        return "unknown"

    @cached_property
    def boot_time(self) -> float | None:
        """When the machine was started, in seconds since the epoch."""
        with contextlib.suppress(OSError):
            for line in self.host.read_text("/proc/stat").splitlines():
                if line.startswith("btime "):
                    return float(line.split()[1])
        return None

    def filesystem(self, path: Path | str) -> Filesystem | None:
        """Where a path lies; read once."""
        known: dict[str, Filesystem | None] = self.__dict__.setdefault("_filesystems", {})
        if str(path) not in known:
            known[str(path)] = filesystem_of(self.host, str(path))
        return known[str(path)]

    @cached_property
    def verification(self) -> Verification:
        """Names, sizes and headers of all outputs, or every hash when the look is deep."""
        return verify_project(self.project, deep=self.deep, progress=self.progress)

    @cached_property
    def store_place(self) -> tuple[str | None, StoreNotMounted | None]:
        """A sentence when the store lies on another disk than before; the error when it is not mounted."""
        with self.ledger() as ledger:
            if ledger is not None:
                try:
                    return require_place(self.layout, ledger), None
                except StoreNotMounted as error:
                    return None, error
        return None, None

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger | None]:
        """The ledger for reading; None when it is missing or cannot be read (a finding of its own)."""
        ledger = None
        with contextlib.suppress(EyasError):
            ledger = Ledger.open_read_only(self.layout.ledger)
        try:
            yield ledger
        finally:
            if ledger is not None:
                ledger.close()

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Events of the newest attempt that did the pipeline's work."""
        folder, events = next(runs(self.layout.logs), (None, []))
        return [{"folder": folder.name, **event} for event in events] if folder is not None else []

    @cached_property
    def last_attempt(self) -> LastAttempt | None:
        """How that attempt went; ``outcome`` is None when it did not end by itself."""
        if not self.events:
            return None
        first, last = self.events[0], self.events[-1]
        ends = [event for event in self.events if event.get("event") == "attempt ended"]
        return LastAttempt(
            name=str(first["folder"]),
            verb=str(first.get("verb", "run")),
            started_at=str(first.get("at")),
            last_event_at=str(last.get("at")),
            outcome=str(ends[-1].get("outcome")) if ends else None,
        )
