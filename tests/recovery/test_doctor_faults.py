"""Each fault alone: doctor names it, and only it; a healthy project has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.hosts.host import Result
from eyas.recovery.doctor import diagnose
from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from tests.recovery import faults_of_files, faults_of_machine  # noqa: F401  (fill the table)
from tests.recovery.conftest import scene_of
from tests.recovery.machine import Disk, FakeGpus, FakeHost, gpus
from tests.recovery.planted import EXITS, FAULTS, World


@pytest.mark.parametrize("name", FAULTS)
def test_doctor_names_each_fault_and_only_it(name: str, project_copy: Callable[[], Path]) -> None:
    code, plant = FAULTS[name]
    world = World(project_copy())
    plant(world)
    found = diagnose(scene_of(world.root, world.host, world.gpus, **world.options))
    assert {finding.code for finding in found.findings} == {code}, [f.what for f in found.findings]
    assert all(finding.mend and finding.what for finding in found.findings)
    grave = any(finding.severity != "warn" for finding in found.findings)
    assert found.exit_code == (0 if not grave else EXITS.get(code, 14))


def test_the_table_is_long_enough() -> None:
    codes = {code for code, _ in FAULTS.values()}
    print(f"{len(FAULTS)} faults of {len(codes)} kinds")
    assert len(FAULTS) >= 25


@pytest.mark.parametrize("deep", [False, True])
def test_a_healthy_project_has_no_finding(deep: bool, project_copy: Callable[[], Path]) -> None:
    found = diagnose(scene_of(project_copy(), deep=deep))
    assert found.findings == []
    assert {line.state for line in found.lines} <= {"ok", "skipped", "unknown"}
    assert found.exit_code == 0


def test_a_new_project_has_no_finding(finished: Path, tmp_path: Path) -> None:
    from tests.recovery.conftest import make_at

    root = make_at(tmp_path, finished / "model")
    assert diagnose(scene_of(root)).findings == []


def test_what_cannot_be_looked_at_is_unknown_and_never_ok(project_copy: Callable[[], Path]) -> None:
    root, host = project_copy(), FakeHost()
    host.commands["systemctl"] = lambda argv: Result(tuple(argv), None, "", "", 5.0)
    host.commands["stat"] = lambda argv: Result(tuple(argv), 1, "", "stat: no", 0.0)
    lines = {line.check: line for line in diagnose(scene_of(root, host)).lines}
    assert lines["services"].state == "unknown"
    assert lines["space"].state == "unknown"
    assert lines["mounts"].state == "unknown"


def test_a_gpu_driver_that_fails_is_unknown(project_copy: Callable[[], Path]) -> None:
    class Broken:
        def read(self) -> None:
            raise OSError(5, "NVML: GPU is lost")

    scene = Scene(Project.open(project_copy()), FakeHost(), Broken())
    line = next(line for line in diagnose(scene, ["gpus"]).lines)
    assert line.state == "unknown"
    assert "GPU is lost" in line.says


def test_a_finished_project_needs_no_room(project_copy: Callable[[], Path]) -> None:
    host = FakeHost()
    host.disks["/"] = Disk("4096 200000000 10 10000000 9000000")
    (line,) = diagnose(scene_of(project_copy(), host), ["space"]).lines
    assert (line.state, line.says) == ("ok", "41.0 kB free, low; nothing left to write")


def test_a_look_changes_nothing(project_copy: Callable[[], Path]) -> None:
    from tests.recovery.trees import tree_digest

    root = project_copy()
    before = tree_digest(root)
    diagnose(scene_of(root))
    assert tree_digest(root) == before


def test_own_processes_on_a_gpu_are_no_fault(project_copy: Callable[[], Path]) -> None:
    root = project_copy()
    found = diagnose(scene_of(root, gpus=FakeGpus(gpus(70.0, (os.getpid(), 70.0)))), ["gpus"])
    assert found.findings == []
