"""Each fault alone: doctor names it, and only it; a healthy project has none."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from eyas.base.process import ProcessIdentity
from eyas.hosts.host import Result
from eyas.recovery.doctor import diagnose
from eyas.recovery.scene import Scene
from eyas.stages.project import Project
from eyas.stages.regenerate.answers import part_files
from eyas.targets.serving.dumps import dump_base, make_dump_folder, new_owner, project_id
from eyas.targets.serving.records import ServerBook, ServerRecord
from tests.recovery.conftest import scene_of
from tests.recovery.machine import MEMINFO, Disk, FakeGpus, FakeHost, FakeSystemd, gpus

UNIT = "vllm-kimi-k25-int4.service"


@dataclass
class World:
    """A copy of the finished project on its own machine."""

    root: Path
    host: FakeHost = field(default_factory=FakeHost)
    gpus: FakeGpus = field(default_factory=FakeGpus)
    options: dict[str, Any] = field(default_factory=dict)

    def segment(self, number: int = 0) -> Path:
        return sorted((self.root / "store" / "segments").glob("*.safetensors"))[number]

    def checkpoint(self) -> Path:
        return sorted((self.root / "drafter" / "checkpoints").glob("step-*"))[-1]

    def sql(self, *statements: str) -> None:
        with sqlite3.connect(self.root / "state" / "ledger.db") as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    def configure(self, old: str, new: str) -> None:
        path = self.root / "eyas.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, offset: int = -100) -> None:
    """Flip one bit, counted from the end when negative; size and time stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(bytes(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def last_event(root: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change (or drop: None) the last event of the newest attempt."""
    path = sorted((root / "logs").glob("attempt-*"))[-1] / "events.jsonl"
    lines = path.read_text().splitlines()
    event = change(json.loads(lines[-1]))
    path.write_text("\n".join(lines[:-1] + ([json.dumps(event)] if event else [])) + "\n")


def process_in(host: FakeHost, pid: int, path: str) -> None:
    host.files[f"/proc/{pid}/cgroup"] = f"0::{path}\n"


EXITS = {"disk-full": 12, "inodes-short": 12, "server-unreachable": 13, "server-silent": 13}
FAULTS: dict[str, tuple[str, Callable[[World], object]]] = {}


def fault(code: str) -> Callable[[Callable[[World], object]], Callable[[World], object]]:
    def note(plant: Callable[[World], object]) -> Callable[[World], object]:
        FAULTS[plant.__name__] = (code, plant)
        return plant

    return note


@fault("segment-damaged")
def segment_truncated(world: World) -> None:
    truncate(world.segment())


@fault("segment-damaged")
def segment_emptied(world: World) -> None:
    os.truncate(world.segment(1), 0)


@fault("segment-damaged")
def segment_header_flipped(world: World) -> None:
    flip(world.segment(), 40)


@fault("segment-damaged")
def segment_content_flipped(world: World) -> None:
    flip(world.segment())
    world.options["deep"] = True


@fault("store-changed")
def segment_changed_by_somebody(world: World) -> None:
    world.segment().write_bytes(world.segment().read_bytes())


@fault("segment-found-damaged")
def segment_found_damaged_by_an_earlier_look(world: World) -> None:
    flip(world.segment())
    assert "segment-damaged" in {f.code for f in diagnose(scene_of(world.root, deep=True)).findings}


@fault("segment-missing")
def segment_gone(world: World) -> None:
    world.segment().unlink()


@fault("segment-unknown")
def segment_unknown(world: World) -> None:
    name = world.segment().name
    world.sql(
        f"UPDATE samples SET state = 'pending', segment = NULL WHERE segment = '{name}'",
        f"DELETE FROM segments WHERE name = '{name}'",
    )


@fault("foreign-file")
def foreign_file(world: World) -> None:
    (world.root / "store" / "segments" / "notes.txt").write_text("mine")


@fault("store-recipe-damaged")
def store_recipe_gone(world: World) -> None:
    (world.root / "store" / "store.json").unlink()


@fault("store-recipe-damaged")
def store_recipe_changed(world: World) -> None:
    path = world.root / "store" / "store.json"
    path.write_text(path.read_text().replace("post_norm", "pre_norm"))


@fault("older-layout")
def older_layout(world: World) -> None:
    folder = world.root / "store" / "rows_0-4"
    folder.mkdir()
    for name in ("0.pt", "1.pt", "2.pt"):
        (folder / name).write_bytes(b"" if name == "2.pt" else b"x")


@fault("store-unhashed")
def written_before_this_boot(world: World) -> None:
    world.sql("UPDATE segments SET committed_at = '2020-01-01T00:00:00.000Z'")


@fault("store-moved")
def store_on_another_disk(world: World) -> None:
    world.sql("UPDATE meta SET value = '9:9 abc /dev/sdz' WHERE key = 'store_place'")


@fault("store-not-mounted")
def store_not_mounted(world: World) -> None:
    world.sql("UPDATE meta SET value = '9:9 abc /dev/sdz' WHERE key = 'store_place'")
    shutil.rmtree(world.root / "store")
    (world.root / "store" / "segments").mkdir(parents=True)


@fault("ledger-missing")
def ledger_gone(world: World) -> None:
    (world.root / "state" / "ledger.db").unlink()


@fault("ledger-damaged")
def ledger_overwritten(world: World) -> None:
    (world.root / "state" / "ledger.db").write_bytes(b"not a ledger" * 400)


@fault("samples-missing")
def two_samples_missing(world: World) -> None:
    name = world.segment().name
    world.sql(f"DELETE FROM samples WHERE id IN (SELECT id FROM samples WHERE segment <> '{name}' LIMIT 2)")


@fault("samples-damaged")
def prompts_damaged(world: World) -> None:
    truncate(next((world.root / "data" / "prompts").glob("*.jsonl")))


@fault("answers-damaged")
def samples_flipped(world: World) -> None:
    flip(world.root / "data" / "samples" / "part-00000.parquet", 60)
    world.options["deep"] = True


@fault("answers-damaged")
def answers_damaged(world: World) -> None:
    truncate(part_files(world.root / "data" / "answers")[0])


@fault("statistics-damaged")
def statistics_gone(world: World) -> None:
    (world.root / "data" / "stats.json").unlink()


@fault("statistics-damaged")
def statistics_do_not_add_up(world: World) -> None:
    path = world.root / "data" / "stats.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"kept": values["kept"] - 1}))


@fault("drafter-damaged")
def checkpoint_truncated(world: World) -> None:
    truncate(world.checkpoint() / "model.safetensors")


@fault("drafter-damaged")
def checkpoint_without_seal(world: World) -> None:
    (world.root / "drafter" / "checkpoints" / "step-00000001").mkdir()


@fault("drafter-damaged")
def vocabulary_file_gone(world: World) -> None:
    next(p for p in (world.root / "drafter" / "vocabulary").iterdir() if p.name != "seal.json").unlink()


@fault("evaluation-damaged")
def evaluation_changed(world: World) -> None:
    path = world.root / "reports" / "evaluation.json"
    path.write_text(path.read_text().replace('"rounds"', '"round5"'))


@fault("export-damaged")
def export_truncated(world: World) -> None:
    truncate(world.root / "exports" / "eagle3" / "model.safetensors")


@fault("weights-missing")
def weights_gone(world: World) -> None:
    (world.root.parent / "model" / "model.safetensors").unlink()


@fault("weights-changed")
def weights_flipped(world: World) -> None:
    flip(world.root.parent / "model" / "model.safetensors")
    world.options["deep"] = True


@fault("recipe-changed")
def recipe_changed(world: World) -> None:
    world.configure("[extract]\n", "[extract]\naux_layers = [1, 2, 3]\n")


@fault("file-missing")
def script_wiped(world: World) -> None:
    (world.root.parent / "outside" / "extract-helper.py").unlink()


@fault("file-changed")
def script_changed(world: World) -> None:
    (world.root.parent / "outside" / "extract-helper.py").write_text("something else\n")


@fault("file-source-lost")
def script_and_its_copy_gone(world: World) -> None:
    (world.root / "helper.py").unlink()


@fault("source-missing")
def source_gone(world: World) -> None:
    (world.root / "prompts.jsonl").unlink()


@fault("filesystem-read-only")
def read_only(world: World) -> None:
    world.host.files["/proc/self/mounts"] = "/dev/vda1 / ext4 ro 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"


@fault("on-wiped-filesystem")
def project_in_memory(world: World) -> None:
    lines = world.host.files["/proc/self/mounts"] + f"tmpfs {world.root} tmpfs rw 0 0\n"
    world.host.files["/proc/self/mounts"] = lines


@fault("disk-full")
def disk_full(world: World) -> None:
    world.host.disks["/"] = Disk("4096 200000000 10 10000000 9000000")


@fault("disk-short")
def disk_short(world: World) -> None:
    world.host.disks["/"] = Disk("4096 200000000 260 10000000 9000000")


@fault("inodes-short")
def no_inodes(world: World) -> None:
    world.host.disks["/"] = Disk("4096 200000000 150000000 10000000 3")


@fault("memory-low")
def memory_low(world: World) -> None:
    world.host.files["/proc/meminfo"] = MEMINFO.replace("60000000", "100000")


@fault("shared-memory-full")
def shared_memory_full(world: World) -> None:
    world.host.disks["/dev/shm"] = Disk("4096 1000000 1000 1000000 999999")


@fault("attempt-killed")
def attempt_killed(world: World) -> None:
    last_event(world.root, lambda event: None)


@fault("clock-behind")
def clock_behind(world: World) -> None:
    world.options["now"] = lambda: time.time() - 10 * 365 * 86400


@fault("samples-set-aside")
def sample_given_up(world: World) -> None:
    segment = world.segment()
    world.sql(
        "UPDATE samples SET state = 'set_aside', failures = 3, reason = 'NaN', segment = NULL"
        f" WHERE segment = '{segment.name}'",
        f"DELETE FROM segments WHERE name = '{segment.name}'",
    )
    segment.unlink()


@fault("gpu-held")
def gpu_held_by_a_process(world: World) -> None:
    world.gpus.now = gpus(75.8, (999_999, 75.8))


@fault("service-holds-gpus")
def gpu_held_by_a_service(world: World) -> None:
    world.gpus.now = gpus(75.8, (999_999, 75.8), count=8)
    process_in(world.host, 999_999, f"/system.slice/{UNIT}")
    world.host.commands["systemctl"] = FakeSystemd(UNIT)


@fault("service-at-boot")
def service_waits_for_the_boot(world: World) -> None:
    world.host.commands["systemctl"] = FakeSystemd(UNIT, active="inactive")


@fault("server-unreachable")
def server_of_others_down(world: World) -> None:
    world.configure("[recovery]\n", '[serve]\nurls = ["http://127.0.0.1:9"]\n[recovery]\n')


def _record(world: World, **changes: Any) -> ServerRecord:
    """A server that a killed run has left behind: its processes are gone."""
    gone = ProcessIdentity(999_999, 5, "another boot")
    record = ServerRecord(
        0,
        "vllm",
        "capture",
        "127.0.0.1",
        9,
        "m",
        "d",
        "marker",
        gone,
        gone,
        None,
        "x.log",
        "2026",
        False,
        True,
    )
    ServerBook(world.root / "state" / "servers.json").put(replace(record, **changes))
    return record


@fault("server-ended")
def server_died_with_the_run(world: World) -> None:
    _record(world)


@fault("server-silent")
def server_does_not_answer(world: World) -> None:
    _record(world, process=ProcessIdentity.of(os.getppid()))


@fault("server-list-damaged")
def server_list_damaged(world: World) -> None:
    (world.root / "state" / "servers.json").write_text("{}")


@fault("dumps-stale")
def dumps_of_a_dead_server(world: World) -> None:
    world.configure("[recovery]\n", '[serve]\ndump_dir = "dumps"\n[recovery]\n')
    project = project_id(world.root / "state")
    gone = ProcessIdentity(999_999, 5, "another boot")
    owner = new_owner(project, gone, "vllm", "1")
    folder = make_dump_folder(dump_base("dumps", world.root), project, replace(owner, boot_id="another boot"))
    (folder / "a-dump-of-it.dump").write_bytes(b"x" * 1000)


PATCH = """[serve]
python = "{python}"
[[serve.patches]]
name = "states"
package = "tests"
file = "tiny.py"
diff = "states.diff"
sha256_before = "{before}"
sha256_after = "{after}"
[recovery]
"""


@fault("patch-drifted")
def engine_was_upgraded(world: World) -> None:
    text = PATCH.format(python=sys.executable, before="0" * 64, after="1" * 64)
    world.configure("[recovery]\n", text)


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
