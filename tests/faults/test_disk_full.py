"""Promise 2 with real filesystems: full, out of inodes, read-only, and full below (the incident)."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from eyas.base.errors import DiskFull, StorageFailed
from eyas.base.layout import Layout
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.store.ledger import Ledger
from tests.faults.acknowledged import acknowledged, acknowledging
from tests.faults.forked import error_of, run_child, run_here
from tests.faults.rounds import fillings
from tests.faults.small import LONG, command, mounted_image, remount, small_project, tmpfs
from tests.projects import outcome, store_content

STOP = ("disk.when_full=stop",)


def test_a_disk_that_is_full_again_and_again(model: Path, expected: dict[str, Any], place: Path) -> None:
    def check(root: Path, what: str) -> None:
        assert outcome(root) == expected, what

    sizes = range(64, 8000, 150 if LONG else 300)
    full = fillings(place, sizes, lambda folder: small_project(folder, model), check)
    print(f"the disk was full {full} times")
    assert full >= 3


def test_a_run_that_waits_goes_on_by_itself(model: Path, expected: dict[str, Any], place: Path) -> None:
    with tmpfs(place / "disk", "size=900k") as disk:
        root = small_project(disk / "p", model)
        child = os.fork()
        if child == 0:
            os._exit(run_here(root))
        deadline, said = time.monotonic() + 120, False
        while time.monotonic() < deadline and not said:
            time.sleep(0.05)
            folders = attempt_folders(Layout(root).logs)
            said = any(
                "paused" in str(event.get("text")) for folder in folders for event in read_events(folder)
            )
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended instead of waiting"
        assert said
        remount(disk, "size=64m")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, error_of(root)
        assert outcome(root) == expected


def test_no_inodes_left(model: Path, expected: dict[str, Any], place: Path) -> None:
    with tmpfs(place / "disk", "size=64m,nr_inodes=24") as disk:
        root = small_project(disk / "p", model)
        assert run_child(root, overrides=STOP) == DiskFull.exit_code, error_of(root)
        assert "inode" in error_of(root)
        remount(disk, "nr_inodes=5000")
        assert run_child(root) == 0, error_of(root)
        assert outcome(root) == expected


def test_a_read_only_filesystem_is_named(model: Path, expected: dict[str, Any], place: Path) -> None:
    with tmpfs(place / "disk", "size=64m") as disk:
        root = small_project(disk / "p", model)
        assert run_child(root, kill_after_seconds=1.0) in (0, -9)
        remount(disk, "ro")
        assert run_child(root) == StorageFailed.exit_code, error_of(root)
        assert "the filesystem is read-only" in error_of(root)
        remount(disk, "rw")
        assert run_child(root) == 0, error_of(root)
        assert outcome(root) == expected


def test_the_incident(model: Path, expected: dict[str, Any], place: Path) -> None:
    """A sparse image on storage that runs full below it: writes succeed, then fsync fails, then it lies."""
    failures = 0
    for kib in range(900, 2600, 200) if LONG else (1100, 1900):
        with tmpfs(place / f"below{kib}", "size=32m") as below:
            image, acks = below / "e.img", place / f"acks{kib}"
            command("truncate", "-s", "64M", image)
            command("mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=0", image)
            with mounted_image(place / f"disk{kib}", image) as disk:
                root = small_project(disk / "p", model)
                command("sync", "-f", root)  # what a person gave is on the disk
                used = sum(path.stat().st_blocks * 512 for path in below.iterdir()) >> 10
                remount(below, f"size={used + kib}k")
                code = run_child(root, prepare=acknowledging(acks), overrides=STOP)
                failures += code != 0
                assert code in (0, DiskFull.exit_code, StorageFailed.exit_code), f"{code} {error_of(root)}"
                remount(below, "size=64m")
            # the filesystem was marked with errors; a person would check and mount it again
            subprocess.run(["umount", str(disk)], check=False, capture_output=True)
            subprocess.run(["fsck.ext4", "-y", "-f", str(image)], check=False, capture_output=True)
            with mounted_image(place / f"again{kib}", image) as disk:
                root = disk / "p"
                assert run_child(root) == 0, error_of(root)
                told = acknowledged(acks)
                # a sample that was stored before is still that one, not captured a second time
                content = store_content(root)
                assert told <= content.keys()
                assert outcome(root) == expected, f"{kib} KiB, exit code {code}"
                with Ledger.open_read_only(Layout(root).ledger) as ledger:
                    lost = ledger.events(kind="segment_set_aside")
                print(f"{kib} KiB: exit code {code}, {len(told)} acknowledged, {len(lost)} segments lost")
                assert not lost, lost
    assert failures >= 1
