"""Recovery of the incident: complete, proven, resumable anywhere, and never beyond its permissions."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.recovery.doctor import diagnose
from eyas.recovery.executor import planned, recover
from eyas.recovery.scene import Scene
from eyas.report.overview import overview
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from eyas.store.todos import history, read_phases
from tests.cli.command import eyas
from tests.faults.small import LONG
from tests.projects import outcome, store_content
from tests.recovery.conftest import scene_of
from tests.recovery.incident import (
    UNIT,
    GpusOf,
    ScriptedSystemd,
    alive,
    bench,
    break_it,
    host_of,
    killed_at,
    rogue,
    wait_until_idle,
)
from tests.recovery.machine import FakeGpus, FakeHost
from tests.recovery.trees import tree_digest

KILLED = -9


@pytest.fixture(scope="session")
def expected(finished: Path) -> dict[str, Any]:
    return outcome(finished / "p")


def todos_of(root: Path) -> dict[str, tuple[str, str]]:
    """Status and evidence of the newest recovery's todos by key."""
    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        phases = [phase for phase in read_phases(ledger) if phase.name == "recovery"]
        return {todo.id.partition("/")[2]: (todo.status, todo.evidence) for todo in phases[-1].todos}


def test_recover_alone_brings_the_incident_back(
    project_copy: Callable[[], Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    root = project_copy()
    print("planted", break_it(root, root.parent / "outside"))
    with rogue() as pid:
        host = host_of(pid, tmp_path / "unit.json")
        before = {f.code for f in diagnose(Scene(Project.open(root), host, GpusOf(pid))).findings}
        assert {"service-holds-gpus", "segment-damaged", "samples-missing", "file-missing"} <= before
        result = recover(bench(root, host, GpusOf(pid), may_stop_services=True))
        assert not alive(pid)
    wait_until_idle(root)
    assert [todo.content for todo in result.left] == []
    assert outcome(root) == expected
    todos = todos_of(root)
    assert {status for status, _ in todos.values()} == {"completed"}
    assert all(evidence for _, evidence in todos.values())
    assert "masked" in todos[f"service:{UNIT}"][1]
    assert "GPU memory used: 100.0 MB" in todos[f"service:{UNIT}"][1]
    assert (
        diagnose(Scene(Project.open(root), host_of(pid, tmp_path / "unit.json"), FakeGpus())).findings == []
    )


def test_history_tells_who_when_and_with_what_evidence(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    os.truncate(sorted((root / "store" / "segments").glob("*.safetensors"))[0], 100)
    recover(bench(root, FakeHost(), FakeGpus()))
    wait_until_idle(root)
    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        changes = history(ledger, "recovery-2/store")
        (phase,) = [phase for phase in read_phases(ledger) if phase.name == "recovery"]
    assert [change.status for change in changes] == ["pending", "in_progress", "completed"]
    assert all("eyas recover" in change.who and change.attempt == 2 and change.at for change in changes)
    assert "set aside" in changes[-1].evidence
    assert (phase.id, phase.outcome) == ("recovery-2", "recovered")
    # the report's timeline has the incident with what mended it, and no todo of the ordinary course
    told = overview(Project.open(root)).incidents
    assert [i.kind for i in told] == ["todo"] * len(phase.todos)
    (mended,) = [i.mended or "" for i in told if i.text.startswith("Mend the store")]
    assert changes[-1].evidence == mended


def test_killed_after_each_step_it_comes_to_the_same_end(
    project_copy: Callable[[], Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    points: list[str] = []
    number, num_killed = 1, 0
    while True:
        root = project_copy()
        break_it(root, root.parent / "outside")
        with rogue() as pid:
            state = tmp_path / f"unit{number}.json"
            child = os.fork()
            if child == 0:
                code = 70
                try:
                    tools = bench(root, host_of(pid, state), GpusOf(pid), may_stop_services=True)
                    tools.point = killed_at(number)  # type: ignore[assignment]
                    code = 0 if not recover(tools).left else 1
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == 0:  # it passed all points without being killed
                break
            assert code == KILLED
            num_killed += 1
            wait_until_idle(root)
            tools = bench(root, host_of(pid, state), GpusOf(pid), may_stop_services=True)
            tools.point = points.append
            result = recover(tools)
            wait_until_idle(root)
            assert [todo.evidence for todo in result.left] == [], f"killed at point {number}"
            assert not alive(pid)
            assert ScriptedSystemd(state).enabled == "masked"
        found = outcome(root) if number % 5 == 1 else {"store": store_content(root)}
        assert found == {key: expected[key] for key in found}, f"killed at point {number}"
        assert {status for status, _ in todos_of(root).values()} == {"completed"}, f"point {number}"
        shutil.rmtree(root.parent)
        number += 1 if LONG else 4
    print(f"killed {num_killed} times at {number} points")
    assert num_killed >= 8


def test_a_dry_run_changes_nothing(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    break_it(root, root.parent / "outside")
    before = tree_digest(root.parent)
    done = eyas("recover", "--dry-run", "--project", root)
    assert done.code == 0, done.err
    listed = eyas("recover", "--dry-run", "--json", "--project", root).json["todos"]
    assert {"ledger", "store", "scrub", "resume"} <= {todo["id"] for todo in listed}
    assert eyas("doctor", "--project", root).code == 14
    assert eyas("todo", "--project", root).code == 0
    assert tree_digest(root.parent) == before


def test_a_service_of_others_is_not_touched_without_permission(
    project_copy: Callable[[], Path], tmp_path: Path
) -> None:
    root = project_copy()
    os.truncate(sorted((root / "store" / "segments").glob("*.safetensors"))[0], 100)
    with rogue() as pid:
        host = host_of(pid, tmp_path / "unit.json")
        result = recover(bench(root, host, GpusOf(pid)))
        assert alive(pid)
        asked = {argv[1:] for argv in host.ran if argv[0] == "systemctl"}
        assert not any({"stop", "disable", "mask", "kill"} & set(words) for words in asked)
    todos = todos_of(root)
    assert todos[f"service:{UNIT}"][0] == "blocked"
    assert "--yes-stop-services" in todos[f"service:{UNIT}"][1]
    assert todos["store"][0] == "completed"  # what does not need the GPUs is done
    assert todos["resume"][0] == "blocked"
    assert result.left


def test_a_line_in_eyas_toml_is_permission_enough(project_copy: Callable[[], Path], tmp_path: Path) -> None:
    root = project_copy()
    config = root / "eyas.toml"
    config.write_text(config.read_text().replace("[recovery]\n", f'[recovery]\nmay_stop = ["{UNIT}"]\n'))
    with rogue(ignore_term=True) as pid:
        result = recover(bench(root, host_of(pid, tmp_path / "unit.json"), GpusOf(pid)))
        assert not alive(pid)
    assert not result.left
    assert "SIGKILL" in todos_of(root)[f"service:{UNIT}"][1]


def test_a_process_without_a_unit_is_left_to_the_person(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    with rogue() as pid:
        host = FakeHost()
        host.files[f"/proc/{pid}/cgroup"] = "0::/user.slice/user-0.slice/session-1.scope\n"
        result = recover(bench(root, host, GpusOf(pid), may_stop_services=True))
        assert alive(pid)
    assert f"kill {pid}" in todos_of(root)[f"gpu-held:process {pid}"][1]
    assert result.left


def test_only_one_todo(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    (root / "data" / "stats.json").unlink()
    os.truncate(sorted((root / "store" / "segments").glob("*.safetensors"))[0], 100)
    recover(bench(root, FakeHost(), FakeGpus()), only="statistics")
    assert (root / "data" / "stats.json").exists()
    assert {f.code for f in diagnose(scene_of(root)).findings} == {"segment-damaged"}
    assert todos_of(root)["statistics"][0] == "completed"
    unknown = eyas("recover", "--only", "nonsense", "--project", root)
    assert unknown.code == 2
    assert "store" in unknown.err


def test_a_lost_ledger_keeps_the_history_of_todos(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    os.truncate(sorted((root / "store" / "segments").glob("*.safetensors"))[0], 100)
    recover(bench(root, FakeHost(), FakeGpus()))
    wait_until_idle(root)
    first = todos_of(root)
    for suffix in ("", "-wal", "-shm"):
        (root / "state" / f"ledger.db{suffix}").unlink(missing_ok=True)
    result = recover(bench(root, FakeHost(), FakeGpus()))
    wait_until_idle(root)
    assert not result.left
    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        phases = [phase for phase in read_phases(ledger) if phase.name == "recovery"]
    assert [phase.id for phase in phases] == ["recovery-2", "recovery-4"]
    kept = {todo.id.partition("/")[2]: (todo.status, todo.evidence) for todo in phases[0].todos}
    assert kept == first
    assert "ledger" in {todo.id.partition("/")[2] for todo in phases[1].todos}


def test_new_samples_are_counted_from_when_the_run_is_resumed(project_copy: Callable[[], Path]) -> None:
    """What the rebuilt ledger adopts was there before: it is no sign that the run works."""
    root = project_copy()
    with Ledger.open_read_only(root / "state" / "ledger.db") as ledger:
        held = ledger.stored_counts()
    first, *others = sorted(held)
    os.truncate(root / "store" / "segments" / first, 100)
    for path in (root / "state").glob("ledger.db*"):
        path.unlink()
    tools, before = bench(root, FakeHost(), FakeGpus()), []
    start = tools.start_run

    def noted(folder: Path, words: Sequence[str]) -> str:
        before.append(tools.baseline_stored)
        return start(folder, words)

    tools.start_run = noted
    assert not recover(tools).left
    wait_until_idle(root)
    assert before == [sum(held[name] for name in others)]
    watched = todos_of(root)["watch"][1]
    assert not any(name in watched for name in held), watched


def test_a_stuck_writer_of_ours_is_ended(project_copy: Callable[[], Path]) -> None:
    import subprocess
    import sys

    root = project_copy()
    code = (
        "import sys, time; from pathlib import Path; from eyas.pipeline.lock import hold_lock\n"
        f"with hold_lock(Path({str(root / 'state')!r}), 'run'): print('held', flush=True); time.sleep(3600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        import time

        later = {"now": lambda: time.time() + 7200}
        found = diagnose(scene_of(root, **later))  # type: ignore[arg-type]
        assert {f.code for f in found.findings} == {"writer-silent"}
        tools = bench(root, FakeHost(), FakeGpus())
        tools.scene.now = later["now"]
        assert not recover(tools).left
        assert child.wait(30) == -15
    finally:
        child.kill()
        child.wait()


def test_nothing_to_recover(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    before = tree_digest(root / "store")
    result = recover(bench(root, FakeHost(), FakeGpus()))
    assert result.phase is None
    assert tree_digest(root / "store") == before
    assert len(list((root / "logs").glob("attempt-*"))) == 1


def test_damaged_outputs_are_set_aside_and_made_again(
    project_copy: Callable[[], Path], expected: dict[str, Any]
) -> None:
    root = project_copy()
    damaged = [
        sorted((root / "drafter" / "checkpoints").glob("step-*"))[-1] / "model.safetensors",
        root / "exports" / "eagle3" / "model.safetensors",
        root / "drafter" / "vocabulary" / "seal.json",
    ]
    for path in damaged:
        os.truncate(path, path.stat().st_size // 2)
    result = recover(bench(root, FakeHost(), FakeGpus()))
    wait_until_idle(root)
    assert not result.left
    assert outcome(root) == expected
    aside = {path.name for path in (root / "set-aside").iterdir()}
    assert sum("vocabulary" in name for name in aside) >= 1


def test_samples_whose_segment_the_ledger_lost_are_not_captured_again(
    project_copy: Callable[[], Path], expected: dict[str, Any]
) -> None:
    root = project_copy()
    with sqlite3.connect(root / "state" / "ledger.db") as connection:
        connection.execute("DELETE FROM samples WHERE id IN (SELECT id FROM samples LIMIT 2)")
    connection.close()
    assert not recover(bench(root, FakeHost(), FakeGpus())).left
    wait_until_idle(root)
    assert store_content(root) == expected["store"]


def test_the_plan_is_ordered_by_what_each_needs(project_copy: Callable[[], Path], tmp_path: Path) -> None:
    root = project_copy()
    break_it(root, root.parent / "outside")
    with rogue() as pid:
        _, steps = planned(Scene(Project.open(root), host_of(pid, tmp_path / "unit.json"), GpusOf(pid)))
    keys = [step.key for step in steps]
    for step in steps:
        assert all(keys.index(key) < keys.index(step.key) for key in step.depends_on)
    wanted = [f"service:{UNIT}", "ledger", "store", "scrub", "weights", "resume", "continuity", "watch"]
    assert [key for key in keys if key in wanted] == wanted
