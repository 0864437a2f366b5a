"""Commands on this machine: deadlines, missing commands, and what a machine says of itself."""

from __future__ import annotations

import os
import time

import psutil

from eyas.base.clock import boot_id
from eyas.hosts.disks import filesystem_of
from eyas.hosts.host import Here
from eyas.hosts.processes import list_processes, owner_of
from eyas.hosts.units import list_services
from tests.recovery.machine import FakeHost, FakeSystemd


def test_a_command_ends_at_its_deadline_with_all_it_started() -> None:
    started = time.monotonic()
    result = Here().run(["sh", "-c", "sleep 987 & echo out; sleep 987"], timeout_seconds=1)
    assert result.timed_out
    assert result.out == "out\n"
    assert time.monotonic() - started < 60
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987"]]
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_command_that_is_not_there() -> None:
    result = Here().run(["no-such-command-of-eyas"])
    assert result.code == 127
    assert "not found" in result.explain()


def test_the_boot_is_known() -> None:
    assert Here().read_text("/proc/sys/kernel/random/boot_id").strip() == boot_id()


def test_a_filesystem_by_its_longest_mount_point() -> None:
    host = FakeHost()
    host.files["/proc/self/mounts"] += "none /data/in\\040memory tmpfs rw 0 0\nnas:/x /data nfs4 ro 0 0\n"
    inside = filesystem_of(host, "/data/in memory/store")
    assert inside is not None
    assert (inside.kind, inside.is_wiped, inside.read_only) == ("tmpfs", True, False)
    beside = filesystem_of(host, "/data/in")
    assert beside is not None
    assert (beside.kind, beside.source, beside.read_only) == ("nfs4", "nas:/x", True)
    assert beside.free_bytes == 4096 * 150_000_000


def test_owners_by_control_group() -> None:
    host = FakeHost()
    groups = {
        "0::/system.slice/vllm.service": ("vllm.service", False, None),
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/tts.service": ("tts.service", True, None),
        "0::/user.slice/user-0.slice/session-3.scope": (None, False, None),
        "0::/system.slice/docker-0123456789abcdef.scope": (None, False, "0123456789ab"),
    }
    for text, wanted in groups.items():
        host.files["/proc/77/cgroup"] = text + "\n"
        owner = owner_of(host, 77)
        assert (owner.unit, owner.user_unit, owner.container) == wanted


def test_this_process_is_among_the_processes() -> None:
    found = {process.pid: process for process in list_processes(Here())}
    assert found[os.getpid()].ppid == os.getppid()


def test_services_that_wait_for_the_boot() -> None:
    host = FakeHost()
    host.commands["systemctl"] = FakeSystemd("vllm-kimi.service", active="inactive")
    (unit,) = list_services(host, user=False) or []
    assert (unit.is_active, unit.starts_at_boot, unit.wants_gpus) == (False, True, True)
    assert unit.command == "/opt/vllm/bin/vllm serve kimi"
    host.commands["systemctl"] = FakeSystemd("cron.service", command="/usr/sbin/cron -f")
    assert not [u for u in list_services(host, user=False) or [] if u.wants_gpus and "cron" in u.command]
