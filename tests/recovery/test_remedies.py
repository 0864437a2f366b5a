"""Remedies one by one: servers, dumps, patches, a service behind a silent systemctl, a stuck process."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import eyas.recovery.scene as scene_module
from eyas.base.process import ProcessIdentity
from eyas.hosts.processes import list_processes
from eyas.recovery.bench import Bench
from eyas.recovery.doctor import diagnose
from eyas.recovery.executor import planned, recover
from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from eyas.targets.serving.dumps import dump_base, make_dump_folder, new_owner, project_id
from eyas.targets.serving.process import MARKER
from eyas.targets.serving.records import ServerBook, ServerRecord
from tests.recovery.conftest import scene_of
from tests.recovery.incident import UNIT, GpusOf, alive, rogue
from tests.recovery.machine import FakeGpus, FakeHost, FakeSystemd
from tests.recovery.test_recover import todos_of
from tests.targets.serving.test_patches import AFTER, BEFORE, DIFF, make_engine, sha256

GONE = ProcessIdentity(999_999, 5, "another boot")


def mend(root: Path, key: str, host: FakeHost | None = None, gpus: object = None, **options: bool) -> str:
    """Carry one todo out; returns its status."""
    scene = Scene(Project.open(root), host or FakeHost(), gpus or FakeGpus())  # type: ignore[arg-type]
    recover(Bench(scene, **options), only=key)  # type: ignore[arg-type]
    return todos_of(root)[key][0]


def codes(root: Path, host: FakeHost | None = None) -> set[str]:
    return {finding.code for finding in diagnose(scene_of(root, host)).findings}


def configure(root: Path, text: str) -> None:
    path = root / "eyas.toml"
    path.write_text(path.read_text().replace("[recovery]\n", f"{text}\n[recovery]\n"))


def test_a_left_server_is_ended_with_its_workers_and_forgotten(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    code = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
input()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, MARKER: "mark-of-it"},
        start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        workers = [p.pid for p in list_processes(FakeHost()) if p.ppid == child.pid]
        assert len(workers) == 1
        configure(root, "[serve]\nstop_seconds = 1")
        book = ServerBook(root / "state" / "servers.json")
        process, dumps = ProcessIdentity.of(child.pid), root / "dumps-of-it"
        dumps.mkdir()
        (dumps / "not-taken-yet.dump").write_bytes(b"states")
        book.put(
            ServerRecord(
                0, "vllm", "capture", "127.0.0.1", 9, "m", "d", "mark-of-it", process, GONE, str(dumps),
                "x.log", "2026", False, True,
            )
        )  # fmt: skip
        book.put(replace(book.read()[0], index=1, marker="another", process=GONE))
        assert codes(root) == {"server-silent", "server-ended"}
        assert mend(root, "servers") == "completed"
        assert child.wait(5) == -9  # it was asked first, and did not listen
        assert not alive(workers[0])
        assert (dumps / "not-taken-yet.dump").exists(), "recovery deletes nothing"
    finally:
        child.kill()
        child.wait()
    assert book.read() == []
    assert codes(root) == set()
    evidence = todos_of(root)["servers"][1]
    assert "http://127.0.0.1:9: process and port gone, GPU memory" in evidence
    assert evidence.endswith("no server is left over or silent")


def test_a_sample_that_was_trained_on_and_released_counts_as_captured(
    project_copy: Callable[[], Path],
) -> None:
    """Else a run that releases faster than it stores would never look alive."""
    root = project_copy()
    bench = Bench(scene_of(root))
    with closing(sqlite3.connect(root / "state" / "ledger.db")) as ledger:
        total = ledger.execute("SELECT count(*) FROM samples").fetchone()[0]
        assert bench.num_stored() == total > 1
        with ledger:
            one = "(SELECT min(id) FROM samples)"
            ledger.execute(f"UPDATE samples SET state = 'released', segment = NULL WHERE id = {one}")
    assert bench.num_stored() == total


def dump_of(root: Path, project: str) -> Path:
    owner = replace(new_owner(project, GONE, "vllm", "1"), boot_id="another boot")
    folder = make_dump_folder(dump_base("dumps", root), project, owner)
    (folder / "a-dump-of-it.dump").write_bytes(b"x" * 1000)
    return folder


def test_only_stale_dumps_of_this_project_are_set_aside(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    configure(root, '[serve]\ndump_dir = "dumps"')
    ours, others = dump_of(root, project_id(root / "state")), dump_of(root, "0123456789abcdef")
    living = make_dump_folder(
        dump_base("dumps", root),
        project_id(root / "state"),
        new_owner(project_id(root / "state"), ProcessIdentity.of(os.getpid()), "vllm", "1"),
    )
    assert codes(root) == {"dumps-stale"}
    assert mend(root, "dumps") == "completed"
    assert (ours.exists(), others.exists(), living.exists()) == (False, True, True)
    (moved,) = (path for path in (root / "set-aside").iterdir() if path.is_dir())
    assert (moved / "a-dump-of-it.dump").read_bytes() == b"x" * 1000
    assert "of a dead server" in (root / "set-aside" / f"{moved.name}.reason.json").read_text()


def test_dumps_that_do_not_fit_are_left_to_the_person(
    project_copy: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project_copy()
    configure(root, '[serve]\ndump_dir = "dumps"')
    folder = dump_of(root, project_id(root / "state"))
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_500))  # 1 MB stays free
    assert mend(root, "dumps") == "blocked"
    assert todos_of(root)["dumps"][1].endswith(f"rm -r {folder}")
    assert folder.exists()


PATCH = """[serve]
python = "{python}"
[[serve.patches]]
name = "hooks"
package = "made_up_engine"
file = "hooks.py"
diff = "hooks.diff"
sha256_before = "{before}"
sha256_after = "{after}\""""


@pytest.fixture
def patched(
    project_copy: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """A project with a declared edit of an engine, and the engine's file."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    hooks, root = make_engine(tmp_path / "site"), project_copy()
    (root / "hooks.diff").write_text(DIFF)
    configure(root, PATCH.format(python=sys.executable, before=sha256(BEFORE), after=sha256(AFTER)))
    return root, hooks


def test_an_edit_that_capturing_needs_is_applied_and_restored_when_nothing_does(
    patched: tuple[Path, Path],
) -> None:
    root, hooks = patched
    assert codes(root) == set()  # everything is captured: it need not be applied
    segment = sorted((root / "store" / "segments").glob("*.safetensors"))[0]
    content = segment.read_bytes()
    segment.unlink()
    assert codes(root) == {"segment-missing", "patch-not-applied"}  # both are mended by one command
    assert mend(root, "store") == "completed"
    assert codes(root) == {"patch-not-applied"}
    assert mend(root, "patch-not-applied:hooks") == "completed"
    assert hooks.read_text() == AFTER
    assert codes(root) == set()
    segment.write_bytes(content)
    assert mend(root, "store") == "completed"  # whole and unknown: adopted, and nothing is left to capture
    assert codes(root) == {"patch-left"}
    away = segment.rename(root / "away")
    assert codes(root) == {"segment-missing"}  # its samples will be captured again, with the edit
    away.rename(segment)
    with sqlite3.connect(root / "state" / "ledger.db") as connection:
        listed = connection.execute("SELECT * FROM samples LIMIT 1").fetchall()
        connection.execute("DELETE FROM samples WHERE id = ?", (listed[0][0],))
    assert codes(root) == {"samples-missing"}
    with sqlite3.connect(root / "state" / "ledger.db") as connection:
        connection.execute(f"INSERT INTO samples VALUES ({', '.join('?' * len(listed[0]))})", listed[0])
    connection.close()
    assert mend(root, "patch-left:hooks") == "completed"
    assert hooks.read_text() == BEFORE
    assert codes(root) == set()


def test_an_engine_that_was_upgraded_is_left_alone(patched: tuple[Path, Path]) -> None:
    root, hooks = patched
    hooks.write_text(BEFORE + "# of the next version\n")
    assert codes(root) == {"patch-drifted"}
    assert mend(root, "patch-drifted:hooks") == "blocked"
    assert "eyas serve patch status" in todos_of(root)["patch-drifted:hooks"][1]
    assert hooks.read_text() == BEFORE + "# of the next version\n"


OUTSIDE = """#!/bin/sh
# the systemctl that the container's host lets us run inside: it works
echo "$*" >> {state}.asked
read active enabled < {state}
case "$*" in
  *show*) printf 'Id={unit}\\nActiveState=%s\\nUnitFileState=%s\\nMainPID=0\\n' $active $enabled ;;
  *" stop "*) echo "inactive $enabled" > {state} ;;
  *" disable "*) echo "$active disabled" > {state} ;;
  *" mask "*) echo "$active masked" > {state} ;;
esac
"""
WAY = """[[hosts]]
name = "pve"
[[hosts.ways]]
inside = ["{way}", "exec", "129"]"""


def container(root: Path, folder: Path) -> Path:
    """Declare the container's host, reached by a script; returns the file with the unit's state there."""
    state, way = folder / "outside", folder / "pct"
    state.write_text("active enabled\n")
    (folder / "tools").mkdir()
    (folder / "tools" / "systemctl").write_text(OUTSIDE.format(state=state, unit=UNIT))
    way.write_text(f'#!/bin/sh\nshift 2\nPATH={folder / "tools"}:$PATH exec "$@"\n')
    for path in (folder / "tools" / "systemctl", way):
        path.chmod(0o755)
    configure(root, WAY.format(way=way))
    path = root / "eyas.toml"
    path.write_text(path.read_text().replace("[recovery]\n", '[recovery]\ncontainer_host = "pve"\n'))
    return state


def test_a_silent_container_is_asked_through_its_host(
    project_copy: Callable[[], Path], tmp_path: Path
) -> None:
    root = project_copy()
    state = container(root, tmp_path)
    with rogue(ignore_term=True) as pid:
        host = FakeHost()
        host.files[f"/proc/{pid}/cgroup"] = f"0::/system.slice/{UNIT}\n"
        inside = FakeSystemd(UNIT, hang=("stop", "disable", "mask", "show"))
        host.commands["systemctl"] = inside
        assert mend(root, f"service:{UNIT}", host, GpusOf(pid), may_stop_services=True) == "completed"
        assert not alive(pid)
    asked = [verb for verb in inside.asked if verb in ("stop", "disable", "mask")]
    assert asked == ["stop", "disable", "mask"]
    outside = [
        line.split()[-3] for line in Path(f"{state}.asked").read_text().splitlines() if "show" not in line
    ]
    assert outside == ["stop", "disable", "mask"]
    assert state.read_text() == "inactive masked\n"
    evidence = todos_of(root)[f"service:{UNIT}"][1]
    steps = [
        f"systemctl stop {UNIT}: ",
        "1 process ended (SIGKILL)",
        "disable: ",
        "the container's host: pve: stop: done",
    ]
    assert [evidence.index(step) for step in steps] == sorted(evidence.index(step) for step in steps)
    assert f"{UNIT}: inactive, masked (by pve); GPU memory used: 100.0 MB" in evidence


def test_a_host_that_is_not_reached_either_leaves_the_todo_blocked(
    project_copy: Callable[[], Path], tmp_path: Path
) -> None:
    root = project_copy()
    container(root, tmp_path)
    (tmp_path / "pct").write_text("#!/bin/sh\necho 'no such container' >&2\nexit 255\n")
    with rogue() as pid:
        host = FakeHost()
        host.files[f"/proc/{pid}/cgroup"] = f"0::/system.slice/{UNIT}\n"
        host.commands["systemctl"] = FakeSystemd(UNIT, hang=("stop", "disable", "mask", "show"))
        status = mend(root, f"service:{UNIT}", host, GpusOf(pid), may_stop_services=True)
    assert status == "blocked"
    assert "systemctl is silent" in todos_of(root)[f"service:{UNIT}"][1]


def test_a_process_stuck_in_the_kernel_is_named_with_its_file_and_left_to_the_person(
    project_copy: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, file = project_copy(), tmp_path / "on-a-hung-mount.safetensors"
    file.touch()
    code = "import sys; f = open(sys.argv[1]); print('up', flush=True); input()"
    words = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        host = FakeHost()
        host.files[f"/proc/{child.pid}/stat"] = f"{child.pid} (python) D 1 1 1 0"
        host.files[f"/proc/{child.pid}/wchan"] = "rpc_wait_bit_killable"

        def stuck(host: FakeHost) -> list[object]:
            return [replace(p, state="D") if p.pid == child.pid else p for p in list_processes(host)]

        monkeypatch.setattr(scene_module, "list_processes", stuck)
        (finding,) = diagnose(scene_of(root, host)).findings
        assert (finding.code, finding.subject) == ("process-stuck", f"process {child.pid}")
        assert "rpc_wait_bit_killable" in finding.what
        assert str(file) in finding.what
        _, steps = planned(scene_of(root, host))
        assert f"process-stuck:process {child.pid}" in [step.key for step in steps]
        assert mend(root, finding.key, host) == "blocked"
        assert "mend the storage" in todos_of(root)[finding.key][1]
        assert alive(child.pid)
