"""Promise 2: the n-th call fails; the run says so clearly or goes on, and the end is the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.base.errors import DamageFound, DiskFull, StorageFailed
from tests.faults.failing import (
    KINDS,
    SQLITE_KINDS,
    fail_behind_seal,
    fail_call,
    fail_statement,
    fired,
)
from tests.faults.forked import error_of, run_child, run_here
from tests.faults.small import LONG, PARTS, SEED, numbers_of, small_project
from tests.projects import outcome

Plan = Callable[[int, str, Path], Callable[[], None]]
MODES = (("disk.when_full=stop",), ())
CLEAR = {0, DiskFull.exit_code, StorageFailed.exit_code, DamageFound.exit_code}


def check_code(root: Path, code: int, kind: str, stops: bool) -> None:
    """A clear end: no traceback, and a full disk is called that."""
    assert code in CLEAR, f"exit code {code}: {error_of(root)}"
    assert "Traceback" not in error_of(root)
    if code and kind in ("ENOSPC", "short", "full", "full after"):
        assert code == DiskFull.exit_code, error_of(root)
    if code == 0 or not stops:
        return
    assert "hint: " in error_of(root), error_of(root)


def chain(root: Path, plan: Plan, kinds: tuple[str, ...], most: int, rng: random.Random) -> list[str]:
    """Faults one after the other in one project, until it is done; returns those that fired."""
    mark = root.with_suffix(".fired")
    for _ in range(400):
        number, kind = rng.randint(1, most), rng.choice(kinds)
        mode = rng.choice(MODES)
        before = len(fired(mark))
        code = run_child(root, prepare=plan(number, kind, mark), overrides=mode)
        check_code(root, code, kind, stops=bool(mode))
        if code == 0 and len(fired(mark)) == before:
            break
    return fired(mark)


@pytest.mark.parametrize(
    ("plan", "kinds", "most", "wanted"),
    [(fail_call, KINDS, 40, 10), (fail_statement, SQLITE_KINDS, 100, 8)],
    ids=["calls", "sqlite"],
)
def test_one_fault_after_another(
    plan: Plan,
    kinds: tuple[str, ...],
    most: int,
    wanted: int,
    model: Path,
    expected: dict[str, Any],
    place: Path,
) -> None:
    rng, faults, projects = random.Random(SEED), list[str](), 0
    while len(faults) < (20 * wanted if LONG else wanted):
        root = small_project(place / f"p{projects}", model)
        projects += 1
        faults += chain(root, plan, kinds, most, rng)
        assert run_child(root) == 0, error_of(root)
        assert outcome(root) == expected, f"seed {SEED}, after {faults}"
        shutil.rmtree(root)
    print(f"seed {SEED}: {len(faults)} faults in {projects} projects: {sorted(set(faults))}")
    assert len(faults) >= wanted


def test_a_disk_that_is_full_behind_each_seal(model: Path, expected: dict[str, Any], place: Path) -> None:
    """The folder has its name already, and the run that waited for room finds it done."""
    places: list[str] = []
    while True:
        root = small_project(place / f"p{len(places)}", model)
        mark = root.with_suffix(".fired")
        code = run_child(root, prepare=fail_behind_seal(len(places) + 1, mark))
        assert code == 0, error_of(root)
        assert outcome(root) == expected
        stated = json.loads((root / "data" / "stats.json").read_text())
        sealed = json.loads((root / "data" / "prompts" / "stats.json").read_text())
        assert stated["regenerate"]["samples"] == len(expected["store"])
        assert {**stated, "regenerate": None} == {**sealed, "regenerate": None}
        if not fired(mark):
            break
        places += fired(mark)
    print(f"full behind {len(places)} seals: {', '.join(places)}")
    # prompts and samples, vocabulary, a checkpoint, the export
    assert set(places) >= {"behind data", "behind drafter", "behind checkpoints", "behind exports"}


@pytest.mark.skipif(not LONG, reason="one run for each call of a run: EYAS_LONG_FAULTS=1")
@pytest.mark.parametrize(
    ("plan", "kind"),
    [(fail_call, kind) for kind in KINDS] + [(fail_statement, kind) for kind in SQLITE_KINDS],
)
@pytest.mark.parametrize("part", PARTS)
def test_every_call_once(
    part: int, plan: Plan, kind: str, model: Path, expected: dict[str, Any], place: Path
) -> None:
    num_fired = 0
    for number in numbers_of(part):
        root, mark = small_project(place / f"p{number}", model), place / f"mark{number}"
        code = run_child(root, prepare=plan(number, kind, mark), overrides=MODES[number // 2 % 2])
        check_code(root, code, kind, stops=number // 2 % 2 == 0)
        if not fired(mark):
            break
        num_fired += 1
        assert run_child(root) == 0, error_of(root)
        assert outcome(root) == expected, f"{kind} at call {number}: {fired(mark)}"
        shutil.rmtree(root)
    print(f"part {part}: {num_fired} faults, {kind}")
    assert num_fired >= 2


def test_a_limit_of_file_size(model: Path, expected: dict[str, Any], place: Path) -> None:
    """Real short writes and EFBIG in every writer, Python's own, Rust's and Arrow's."""
    root = small_project(place / "p", model)
    # each limit lets the run get further: parquet, ledger, segments, checkpoints
    limits, codes, hits = [1 << 10, 64 << 10, 100 << 10, 300 << 10], [], []
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    for limit in limits:

        def lower(limit: int = limit) -> None:
            # the kernel's own word for each write that the limit stopped
            signal.signal(signal.SIGXFSZ, lambda *_: os.write(write_end, b"x"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        codes.append(run_child(root, prepare=lower, overrides=MODES[0]))
        with contextlib.suppress(BlockingIOError):
            hits.append(len(os.read(read_end, 1 << 16)))
        # to SQLite a limit below free space is an I/O error, not a full disk
        assert codes[-1] in (DiskFull.exit_code, StorageFailed.exit_code), f"{limit}: {error_of(root)}"
    for descriptor in (read_end, write_end):
        os.close(descriptor)
    print(f"{sum(hits)} writes stopped at {len(hits)} of {len(limits)} limits: {codes}")
    assert len(hits) == len(limits)
    assert codes.count(DiskFull.exit_code) >= 1
    assert run_child(root) == 0, error_of(root)
    assert outcome(root) == expected


def traced_child(root: Path, call: str, error: str, number: int) -> tuple[int, int]:
    """Run a project in a child whose ``number``-th system call ``call`` fails.

    Returns:
        The exit code, and how many calls the tracer says it made fail.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            # opened before a call to open can fail
            with open("/proc/self/status") as status:
                while "TracerPid:\t0\n" in status.read():
                    time.sleep(0.005)
                    status.seek(0)
            code = run_here(root, overrides=MODES[0])
        finally:
            os._exit(code)
    inject = f"inject={call}:error={error}:when={number}"
    log = root.with_name(root.name + ".strace")
    words = ["strace", "-f", "-p", str(child), "-o", str(log), "-e", f"trace={call}", "-e", inject]
    tracer = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status = os.waitpid(child, 0)
    tracer.wait(timeout=30)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace").count("(INJECTED)")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("call", ["write", "pwrite64", "ftruncate", "fallocate", "openat", "mkdir"])
def test_system_calls_of_any_library_fail(
    call: str, error: str, model: Path, expected: dict[str, Any], place: Path
) -> None:
    """The kernel's view: also what Rust, Arrow and SQLite call themselves."""
    if not LONG and (call, error) not in (("write", "ENOSPC"), ("pwrite64", "EIO")):
        pytest.skip("EYAS_LONG_FAULTS=1")
    rng = random.Random(f"{SEED} {call} {error}")
    faults = projects = 0
    root = small_project(place / "p0", model)
    for _ in range(40 if LONG else 4):
        code, injected = traced_child(root, call, error, rng.randint(1, 40))
        assert code in CLEAR | {2}, f"{call} {error}: exit code {code}: {error_of(root)}"
        faults += injected
        if code == 0:  # it came through: what it survived was no loss, and a finished project calls little
            assert outcome(root) == expected
            projects += 1
            root = small_project(place / f"p{projects}", model)
    print(f"seed {SEED}: {faults} faults of {call} in {projects + 1} projects")
    assert faults >= 2
    assert run_child(root) == 0, error_of(root)
    assert outcome(root) == expected
