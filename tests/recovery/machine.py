"""A machine whose facts a test decides: files of /proc, systemctl, disks and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from eyas.hosts.gpus import Gpu, GpuUser
from eyas.hosts.host import Here, Result

GIGA = 10**9
MOUNTS = "/dev/vda1 / ext4 rw,relatime 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
MEMINFO = "MemTotal:       64000000 kB\nMemAvailable:   60000000 kB\n"


def gpus(used_gb: float = 0.1, *users: tuple[int, float], count: int = 2, busy: int = 0) -> list[Gpu]:
    """Equal GPUs of 80 GB; ``users`` are (pid, GB) on each of them."""
    on = tuple(GpuUser(pid, int(gb * GIGA)) for pid, gb in users)
    return [Gpu(i, "fake H100", 80 * GIGA, int(used_gb * GIGA), busy, on) for i in range(count)]


@dataclass
class FakeGpus:
    """GPUs as a test wants them; may be changed while it runs."""

    now: list[Gpu] | None = field(default_factory=gpus)

    def read(self) -> list[Gpu] | None:
        return self.now


@dataclass(frozen=True)
class Disk:
    """What ``stat -f`` says: block size, blocks, free blocks, inodes, free inodes."""

    numbers: str = "4096 200000000 150000000 10000000 9000000"


class FakeHost(Here):
    """This machine, but for the files and commands that a test replaces."""

    def __init__(self) -> None:
        self.files = {"/proc/self/mounts": MOUNTS, "/proc/meminfo": MEMINFO}
        self.disks = {"/dev/shm": Disk()}
        self.commands: dict[str, Callable[[Sequence[str]], Result]] = {
            "systemctl": no_units,
            "stat": self._stat,
        }
        self.ran: list[tuple[str, ...]] = []

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float = 10.0, stdin: IO[bytes] | None = None
    ) -> Result:
        self.ran.append(tuple(argv))
        fake = self.commands.get(argv[0])
        return fake(argv) if fake is not None else super().run(argv, timeout_seconds=timeout_seconds)

    def read_text(self, path: str) -> str:
        return self.files[path] if path in self.files else super().read_text(path)

    def _stat(self, argv: Sequence[str]) -> Result:
        prefixes = [prefix for prefix in self.disks if argv[-1].startswith(prefix)]
        disk = self.disks[max(prefixes, key=len)] if prefixes else Disk()
        return Result(tuple(argv), 0, disk.numbers + "\n", "", 0.0)


def no_units(argv: Sequence[str]) -> Result:
    """A systemd that answers and has no services."""
    return Result(tuple(argv), 0, "", "", 0.0)


@dataclass
class FakeSystemd:
    """A scripted systemctl with one unit; ``hang`` names verbs that never come back."""

    unit: str
    active: str = "active"
    enabled: str = "enabled"
    command: str = "/opt/vllm/bin/vllm serve kimi"
    hang: tuple[str, ...] = ()
    on_stop: Callable[[], None] = lambda: None
    asked: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> Result:
        words = [word for word in argv[1:] if not word.startswith("-")]
        verb, user = words[0], "--user" in argv
        self.asked.append(verb)
        out = ""
        if verb in self.hang:
            return Result(tuple(argv), None, "", "", 1.0)
        if user:
            return Result(tuple(argv), 0, "", "", 0.0)
        if verb == "list-units" and self.active in ("active", "failed"):
            out = f"{self.unit} loaded {self.active} running a server\n"
        elif verb == "list-unit-files" and self.enabled == "enabled":
            out = f"{self.unit} enabled enabled\n"
        elif verb == "show":
            out = (
                f"Id={self.unit}\nActiveState={self.active}\nSubState=running\nUnitFileState={self.enabled}\n"
                f"MainPID=0\nExecStart={{ path=/x ; argv[]={self.command} ; }}\nDescription=a server\n"
            )
        elif verb == "stop":
            self.active = "inactive"
            self.on_stop()
        elif verb == "disable":
            self.enabled = "disabled"
        elif verb == "mask":
            self.enabled = "masked"
        return Result(tuple(argv), 0, out, "", 0.0)
