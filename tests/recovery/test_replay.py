"""The founding incident, replayed with real parts, and one command to bring it back.

A run in a process of its own; its store on a filesystem image whose storage runs full underneath; kill -9;
the store moved to another disk; files outside the project wiped; a stray server on all GPUs under a scripted
systemctl whose stop hangs; samples missing, a segment cut, a bit flipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.recovery.bench import Bench
from eyas.recovery.doctor import diagnose
from eyas.recovery.executor import recover
from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.todos import read_phases
from eyas.targets.serving.records import ServerBook
from tests.cli.command import eyas, eyas_process
from tests.faults.small import command, mounted_image, remount, tmpfs
from tests.hosts.driver import build_driver
from tests.projects import measured, outcome
from tests.recovery.conftest import make_at
from tests.recovery.incident import UNIT, GpusOf, alive, rogue, wait_until_idle
from tests.recovery.machine import FakeHost
from tests.targets.serving.test_patches import AFTER, BEFORE, DIFF, make_engine, sha256

ENGINE = Path(__file__).parents[1] / "fake_engine.py"

SYSTEMCTL = """#!/bin/sh
# a systemctl with one unit; its stop never comes back
state="{state}"
read active enabled < "$state"
echo "$*" >> "{state}.asked"
case "$*" in
  *--user*) ;;
  *list-units*) [ "$active" = active ] && echo "{unit} loaded active running a server" ;;
  *list-unit-files*) [ "$enabled" = enabled ] && echo "{unit} enabled enabled" ;;
  *show*) printf 'Id={unit}\\nActiveState=%s\\nUnitFileState=%s\\nMainPID=0\\n' $active $enabled
          echo 'ExecStart={{ path=/opt/vllm ; argv[]=vllm serve kimi ; }}' ;;
  *stop*) exec sleep 3600 ;;
  *disable*) echo "inactive disabled" > "$state" ;;
  *mask*) echo "inactive masked" > "$state" ;;
esac
exit 0
"""


@contextlib.contextmanager
def ext4(folder: Path, image: Path, size: str) -> Iterator[Path]:
    """A new filesystem in an image file, mounted on ``folder``."""
    command("truncate", "-s", size, image)
    command("mkfs.ext4", "-q", "-F", "-O", "^has_journal", image)
    with mounted_image(folder, image):
        yield folder


def stored_segments(root: Path) -> int:
    with contextlib.suppress(Exception), Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        return len(ledger.segments())
    return 0


def captures(root: Path, attempt: int) -> bool:
    """Whether a run has come to capturing: before, its servers start, and nothing is to be written yet."""
    log = root / "logs" / f"attempt-{attempt:04}" / "events.jsonl"
    return log.exists() and '"label": "capture"' in log.read_text()


def until_full_and_killed(root: Path, below: Path) -> None:
    """Run until the storage under the image has run full with a few segments on it; then kill -9.

    A run that the disk's own error ended (EIO) is started again, as somebody would at night.
    """
    used = int(subprocess.check_output(["du", "-sk", str(below)]).split()[0])
    room, attempt, killed = 90, 0, False
    remount(below, f"size={used + room}k")
    deadline = time.monotonic() + 480
    while not killed:
        run = eyas_process("run", "--project", root, start_new_session=True)
        attempt += 1
        try:
            # room comes in steps smaller than a segment: what stops the capture is the storage, not this loop
            while run.poll() is None and not killed:
                assert time.monotonic() < deadline, "the run does not store anything"
                time.sleep(0.5)
                if captures(root, attempt):
                    killed = stored_segments(root) >= 2
                    room += 0 if killed else 12
                    remount(below, f"size={used + room}k")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            _, err = run.communicate()
        killed = run.returncode == -signal.SIGKILL
        assert killed or "EIO: Input/output error" in err, err
    for server in ServerBook(root / "state" / "servers.json").read():
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGKILL)
    print(
        f"storage ran full {room} KiB after the start, {stored_segments(root)} segments by the ledger,"
        f" {attempt - 1} runs ended by the disk's error"
    )


def damage(root: Path, *, flip: bool) -> None:
    """Two samples missing, one segment cut, one bit flipped (or none); all segments older than this boot."""
    segments = sorted((root / "store" / "segments").glob("*.safetensors"))
    os.truncate(segments[0], segments[0].stat().st_size // 2)
    if flip:
        data = bytearray(segments[1].read_bytes())
        data[-30] ^= 8
        segments[1].write_bytes(bytes(data))
    with sqlite3.connect(root / "state" / "ledger.db") as connection:
        connection.execute(
            "DELETE FROM samples WHERE id IN (SELECT id FROM samples WHERE state <> 'stored' LIMIT 2)"
        )
        connection.execute("UPDATE segments SET committed_at = '2020-01-01T00:00:00.000Z'")
    connection.close()


@dataclass
class Morning:
    """What is found: the machine with its rogue server (process ``pid``), and the state of its unit."""

    root: Path
    host: FakeHost
    pid: int
    unit: Path

    def scene(self, *, deep: bool = False) -> Scene:
        return Scene(Project.open(self.root), self.host, GpusOf(self.pid), deep=deep)


@contextlib.contextmanager
def the_morning_after(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, flip: bool = True
) -> Iterator[Morning]:
    """Run until the storage is full, kill everything, move the disk, damage, wipe, take the GPUs."""
    config = (root / "eyas.toml").read_text()
    config = config.replace("[disk]\n", "[disk]\nlook_again_seconds = 0.2\n").replace('"1MB"', '"10kB"')
    (root / "eyas.toml").write_text(config.replace('"2MB"', '"20kB"'))
    store, copied = root / "store", tmp_path / "copied"
    with tmpfs(tmp_path / "below", "size=64m") as below, ext4(store, below / "old.img", "24M"):
        until_full_and_killed(root, below)
        remount(below, "size=64m")  # the storage gets room again, and the disk is moved
        shutil.copytree(store, copied, ignore=shutil.ignore_patterns("lost+found"))
    (root.parent / "outside" / "extract-helper.py").unlink()
    with tmpfs(tmp_path / "elsewhere", "size=64m") as elsewhere, ext4(store, elsewhere / "new.img", "32M"):
        shutil.copytree(copied, store, dirs_exist_ok=True)
        damage(root, flip=flip)
        state, tools = tmp_path / "unit", tmp_path / "tools"
        state.write_text("active enabled\n")
        tools.mkdir()
        (tools / "systemctl").write_text(SYSTEMCTL.format(state=state, unit=UNIT))
        (tools / "systemctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        with rogue(ignore_term=True) as pid:
            host = FakeHost()
            host.commands.clear()  # systemctl is the script on PATH, disks are the real ones
            host.files = {f"/proc/{pid}/cgroup": f"0::/system.slice/{UNIT}\n"}
            yield Morning(root, host, pid, state)


FOUND = {
    "service-holds-gpus", "segment-damaged", "samples-missing", "file-missing", "store-moved",
    "store-unhashed",
}  # fmt: skip


def require_recovered(morning: Morning) -> dict[str, str]:
    """One command brings it back; returns its todos' evidence by key."""
    codes = {finding.code for finding in diagnose(morning.scene()).findings}
    print("found", sorted(codes))
    # how the run ended is by chance: killed while it waited, or by the disk's own error
    assert codes >= FOUND
    result = recover(Bench(morning.scene(), may_stop_services=True, say=print))
    assert not alive(morning.pid)
    wait_until_idle(morning.root, 600)
    assert [f"{todo.id}: {todo.evidence}" for todo in result.left] == []
    with Ledger.open_read_only(morning.root / "state" / "ledger.db") as ledger:
        todos = next(p for p in read_phases(ledger) if p.name == "recovery").todos
    assert all(todo.status == "completed" and todo.evidence for todo in todos)
    assert morning.unit.read_text() == "inactive masked\n"
    after = diagnose(morning.scene(deep=True))
    assert {f.code for f in after.findings} <= {"on-wiped-filesystem"}, [f.what for f in after.findings]
    return {todo.id.partition("/")[2]: todo.evidence for todo in todos}


@pytest.mark.timeout(900)
def test_one_command_brings_the_incident_back(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    expected: dict[str, Any] = outcome(finished / "p")
    root = make_at(tmp_path / "world", finished / "model")
    with the_morning_after(root, tmp_path, monkeypatch) as morning:
        require_recovered(morning)
        assert outcome(root) == expected


@contextlib.contextmanager
def member_of(unit: str, pid: int) -> Iterator[None]:
    """Put a process into the control group that systemd would have made for its unit."""
    with open("/proc/self/mounts") as mounts:
        places = [line.split()[1] for line in mounts if line.split()[2] == "cgroup2"]
    if not places:
        pytest.skip("no control groups (version 2) to put the stray server into")
    slice_ = Path(places[0]) / "system.slice"
    was_there = slice_.exists()
    group = slice_ / unit
    try:
        group.mkdir(parents=True)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        group.rmdir()
        if not was_there:
            slice_.rmdir()


@pytest.mark.timeout(900)
def test_the_command_alone_does_it_on_the_machine_itself(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is replaced inside of eyas: a driver, a control group and a systemctl are what it finds."""
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    expected = outcome(finished / "p")
    root = make_at(tmp_path / "world", finished / "model")
    (tmp_path / "nvml").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_driver(tmp_path / "nvml")))
    with the_morning_after(root, tmp_path, monkeypatch) as morning, member_of(UNIT, morning.pid):
        monkeypatch.setenv("FAKE_GPUS", ";".join([f"80000:75800:{morning.pid}"] * 8))
        code, found, _ = command_line("doctor", "--json", "--project", root)
        codes = {f["code"] for check in json.loads(found)["checks"] for f in check["findings"]}
        assert code == 14
        assert codes >= FOUND
        # without permission the service stays as it is, and the person is told what to say
        code, _, err = command_line("recover", "--dry-run", "--project", root)
        assert (code, alive(morning.pid)) == (0, True)
        assert f"next: eyas recover --yes-stop-services --project {root}" in err
        code, out, err = command_line("recover", "--yes-stop-services", "--project", root)
        print(out, err)
        assert code == 0
        assert not alive(morning.pid)
        assert morning.unit.read_text() == "inactive masked\n"
        assert re.search(r"^left      nothing$", out, re.M)
        wait_until_idle(root, 600)
        assert outcome(root) == expected
        _, listed, _ = command_line("todo", "--all", "--json", "--project", root)
        todos = [todo for todo in json.loads(listed)["todos"] if todo["id"].startswith("recovery-")]
        assert {todo["status"] for todo in todos} == {"completed"}
        assert all(todo["evidence"] for todo in todos)
        code, found, _ = command_line("doctor", "--deep", "--json", "--project", root)
        left = {f["code"] for check in json.loads(found)["checks"] for f in check["findings"]}
        assert (code, left - {"on-wiped-filesystem"}) == (0, set()), found


def command_line(*words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb in a process of its own."""
    process = eyas_process(*words)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


SERVED = """[serve]
command = ["{python}", "{engine}"]
python = "{python}"
dump_dir = "{dumps}"
[[serve.patches]]
name = "hooks"
package = "made_up_engine"
file = "hooks.py"
diff = "hooks.diff"
sha256_before = "{before}"
sha256_after = "{after}"
[client]
tokens_in_flight = 150
[recovery]
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("memory", ["left", "wiped"])
def test_it_brings_a_run_through_servers_back(
    memory: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a server that eyas started, killed with the run; its source is edited.

    Its dumps lie there still, or shared memory was wiped with them.
    """
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    root, dumps = make_at(tmp_path / "world", finished / "model"), tmp_path / "memory"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    hooks = make_engine(tmp_path / "site")
    (root / "hooks.diff").write_text(DIFF)
    served = SERVED.format(
        python=sys.executable, engine=ENGINE, dumps=dumps, before=sha256(BEFORE), after=sha256(AFTER)
    )
    config = (root / "eyas.toml").read_text().replace("[recovery]\n", served)
    (root / "eyas.toml").write_text(config.replace("[target]\n", '[target]\nkind = "vllm"\n'))
    assert eyas("serve", "patch", "apply", "--project", root).code == 0
    # one of two segments stays whole, so that there is something to capture again and compare
    with the_morning_after(root, tmp_path, monkeypatch, flip=False) as morning:
        (server,) = ServerBook(root / "state" / "servers.json").read()
        assert (server.mode, server.process.alive) == ("capture", False)
        assert server.dump_dir is not None
        if memory == "left":
            (Path(server.dump_dir) / "never-taken.dump").write_bytes(b"states" * 100)
        else:
            shutil.rmtree(dumps)
        codes = {finding.code for finding in diagnose(morning.scene()).findings}
        assert "server-ended" in codes
        assert ("dumps-stale" in codes) == (memory == "left")
        assert not {code for code in codes if code.startswith("patch")}  # the edit survived, as it has to
        evidence = require_recovered(morning)
        assert "proven by a real request" in evidence["canary"] or "canary" in evidence["canary"]
        assert "stored samples come out the same" in evidence["continuity"]
        assert not Path(server.dump_dir).exists()
        aside = [path.name for path in (root / "set-aside").rglob("never-taken.dump")]
        assert aside == (["never-taken.dump"] if memory == "left" else [])
        assert ServerBook(root / "state" / "servers.json").read() == []
        assert hooks.read_text() == BEFORE  # restored when nothing was left to capture
        assert largest_difference(root, finished / "p") < 1e-4
        assert measured(root)["lossless"] == measured(finished / "p")["lossless"]


def largest_difference(root: Path, other: Path) -> float:
    """Between the states of two stores, relative to their norm; both have to hold the same samples."""
    found = []
    with (
        Ledger.open_read_only(root / "state" / "ledger.db") as one,
        Ledger.open_read_only(other / "state" / "ledger.db") as two,
    ):
        ours, theirs = (
            StoreReader(root / "store" / "segments", one),
            StoreReader(other / "store" / "segments", two),
        )
        assert sorted(ours.ids()) == sorted(theirs.ids())
        for id_ in ours.ids():
            mine, other_one = ours.sample(id_, check=True), theirs.sample(id_, check=True)
            for left, right in ((mine.aux, other_one.aux), (mine.last, other_one.last)):
                a, b = left.array.astype(np.float64), right.array.astype(np.float64)
                found.append(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)))
    return max(found)
