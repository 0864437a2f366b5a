"""The morning after, in small: what the incident left, and a machine whose GPUs a stray service holds."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eyas.hosts.gpus import Gpu
from eyas.hosts.host import Result
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.pipeline.lock import current_holder
from eyas.recovery.bench import Bench
from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from tests.faults.forked import run_here
from tests.recovery.machine import FakeHost, gpus

UNIT = "vllm-kimi-k25-int4.service"


def break_it(root: Path, outside: Path) -> dict[str, int]:
    """Two samples missing, a segment cut, one gone, one with a flipped bit, a script gone; counts them."""
    segments = sorted((root / "store" / "segments").glob("*.safetensors"))
    assert len(segments) >= 4, "the project has to have segments to break"
    for name in ("drafter", "exports", "reports"):
        shutil.rmtree(root / name, ignore_errors=True)
    lost, cut, flipped = segments[0], segments[1], segments[2]
    with sqlite3.connect(root / "state" / "ledger.db") as connection:
        connection.execute(
            "UPDATE samples SET state = 'pending', segment = NULL WHERE segment = ?", (lost.name,)
        )
        connection.execute("DELETE FROM segments WHERE name = ?", (lost.name,))
        missing = connection.execute(
            "DELETE FROM samples WHERE id IN (SELECT id FROM samples WHERE segment = ? LIMIT 2)",
            (segments[3].name,),
        ).rowcount
        connection.execute("UPDATE segments SET committed_at = '2020-01-01T00:00:00.000Z'")
    connection.close()
    lost.unlink()
    os.truncate(cut, cut.stat().st_size // 3)
    data = bytearray(flipped.read_bytes())
    data[-50] ^= 1
    flipped.write_bytes(bytes(data))
    (root / "data" / "stats.json").unlink()
    for path in outside.iterdir():
        path.unlink()
    events = attempt_folders(root / "logs")[-1] / "events.jsonl"
    lines = [line for line in events.read_text().splitlines() if "attempt ended" not in line]
    events.write_text("\n".join(lines) + "\n")
    return {"missing": missing, "cut": 1, "flipped": 1, "lost": 1, "statistics": 1, "script": 1}


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@contextmanager
def rogue(ignore_term: bool = False) -> Iterator[int]:
    """A process in a session of its own that plays the stray server."""
    trap = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignore_term else ""
    code = f"import signal, time; {trap} print('up', flush=True); time.sleep(3600)"
    start = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
        " stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True);"
        " print(p.stdout.readline(), p.pid)"
    )
    # started by a process that ends: nobody of ours is above it
    said = subprocess.run([sys.executable, "-c", start, code], capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == "up"
    pid = int(said.stdout.split()[1])
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class GpusOf:
    """GPUs that a process holds as long as it runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def read(self) -> list[Gpu]:
        return gpus(75.8, (self.pid, 75.8), count=8) if alive(self.pid) else gpus(0.1, count=8)


class ScriptedSystemd:
    """A systemctl with one unit whose state lies in a file, so that it outlives a killed recovery."""

    def __init__(self, state: Path, hang: tuple[str, ...] = ("stop",)) -> None:
        self._state, self._hang = state, hang
        if not state.exists():
            self._save("active", "enabled")

    def _save(self, active: str, enabled: str) -> None:
        self._state.write_text(json.dumps([active, enabled]))

    @property
    def enabled(self) -> str:
        return str(json.loads(self._state.read_text())[1])

    def __call__(self, argv: Sequence[str]) -> Result:
        active, enabled = json.loads(self._state.read_text())
        words = [word for word in argv[1:] if not word.startswith("-")]
        verb, out = words[0], ""
        if "--user" in argv:
            return Result(tuple(argv), 0, "", "", 0.0)
        if verb in self._hang:
            return Result(tuple(argv), None, "", "", 3.0)
        if verb == "list-units" and active == "active":
            out = f"{UNIT} loaded active running a server\n"
        elif verb == "list-unit-files" and enabled == "enabled":
            out = f"{UNIT} enabled enabled\n"
        elif verb == "show":
            out = (
                f"Id={UNIT}\nActiveState={active}\nSubState=running\nUnitFileState={enabled}\nMainPID=0\n"
                "ExecStart={ path=/opt/vllm ; argv[]=vllm serve kimi ; }\nDescription=a server\n"
            )
        elif verb == "stop":
            active = "inactive"
        elif verb in ("disable", "mask"):
            enabled = "disabled" if verb == "disable" else "masked"
            active = "inactive"  # its process is gone and nothing starts it again
        self._save(active, enabled)
        return Result(tuple(argv), 0, out, "", 0.0)


def host_of(pid: int, state: Path, hang: tuple[str, ...] = ("stop",)) -> FakeHost:
    """A machine on which process ``pid`` belongs to the unit."""
    host = FakeHost()
    host.files[f"/proc/{pid}/cgroup"] = f"0::/system.slice/{UNIT}\n"
    host.commands["systemctl"] = ScriptedSystemd(state, hang)
    return host


def run_in_background(root: Path, options: Sequence[str]) -> str:
    """``eyas run`` in a process that outlives the caller, without the start of a Python."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            code = 70
            try:
                code = run_here(root)
            finally:
                os._exit(code)
        os._exit(0)
    os.waitpid(middle, 0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        holder = current_holder(root / "state")
        last = read_events(attempt_folders(root / "logs")[-1])
        if (holder is not None and holder.verb == "run") or (last and last[0].get("verb") == "run"):
            return "started"
        time.sleep(0.02)
    return "did not start"


def bench(root: Path, host: FakeHost, graphics: object, **options: object) -> Bench:
    """Tools of a recovery whose run is a forked child."""
    scene = Scene(Project.open(root), host, graphics)  # type: ignore[arg-type]
    tools = Bench(scene, **options)  # type: ignore[arg-type]

    def start(folder: Path, words: Sequence[str]) -> str:
        tools.release()  # SQLite must not be carried through a fork
        said = run_in_background(folder, words)
        tools.attach(Ledger.open(folder / "state" / "ledger.db", create=False))
        return said

    tools.start_run = start
    return tools


def wait_until_idle(root: Path, seconds: float = 240) -> None:
    """Until nobody writes to the project."""
    deadline = time.monotonic() + seconds
    while current_holder(root / "state") is not None:
        assert time.monotonic() < deadline, "the run does not end"
        time.sleep(0.1)


def killed_at(number: int) -> object:
    """A point that kills this process when it is passed for the ``number``-th time."""
    passed = [0]

    def point(name: str) -> None:
        if name == "waiting":
            return
        passed[0] += 1
        if passed[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return point
