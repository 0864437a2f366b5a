"""Faults of the machine: disks, memory, GPUs, services, servers and their engine."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from typing import Any

from eyas.base.process import ProcessIdentity
from eyas.targets.serving.dumps import dump_base, make_dump_folder, new_owner, project_id
from eyas.targets.serving.records import ServerBook, ServerRecord
from tests.recovery.machine import MEMINFO, Disk, FakeSystemd, gpus
from tests.recovery.planted import UNIT, World, fault, last_event, process_in


@fault("filesystem-read-only")
def read_only(world: World) -> None:
    world.host.files["/proc/self/mounts"] = "/dev/vda1 / ext4 ro 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"


@fault("on-wiped-filesystem")
def project_in_memory(world: World) -> None:
    lines = world.host.files["/proc/self/mounts"] + f"tmpfs {world.root} tmpfs rw 0 0\n"
    world.host.files["/proc/self/mounts"] = lines


def unfinished(world: World) -> None:
    """Something is left to be written: only then is there too little room."""
    shutil.rmtree(world.root / "exports")


@fault("disk-full")
def disk_full(world: World) -> None:
    unfinished(world)
    world.host.disks["/"] = Disk("4096 200000000 10 10000000 9000000")


@fault("disk-short")
def disk_short(world: World) -> None:
    unfinished(world)
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
