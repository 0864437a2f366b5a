"""The world changes around a run: places wiped, clock moved, ledger lost, folder and disks moved."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.base import clock
from eyas.base.errors import StoreNotMounted
from eyas.base.layout import Layout
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.pipeline.order import STAGES
from eyas.store.ledger import Commit, Ledger
from eyas.store.reader import StoreReader
from tests.cli.command import eyas
from tests.faults.forked import KILLED, error_of, run_child, start_child
from tests.faults.small import LONG, SEED, small_project, tmpfs
from tests.projects import outcome

TRIES = 10
"""Projects in which a signal may come too late."""


def stage_of(root: Path) -> str:
    """The stage that the newest attempt is in."""
    folders = attempt_folders(Layout(root).logs)
    started = [e for e in read_events(folders[-1]) if e["event"] == "stage started"] if folders else []
    return str(started[-1]["stage"]) if started else ""


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def await_stage(root: Path, child: int, stage: str) -> None:
    while stage_of(root) != stage and not ended(child):
        time.sleep(0.005)


def half_done(root: Path, rng: random.Random) -> None:
    """Kill a run somewhere in its capture, or later, but before its end."""
    child = start_child(root)
    await_stage(root, child, rng.choice(["extract", "train"]))
    time.sleep(rng.uniform(0, 0.2))
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == KILLED, f"it ended before it was killed, with {code}: {error_of(root)}"


def ledger_of(state: Path) -> dict[str, bytes]:
    """The ledger's files, by name."""
    return {path.name: path.read_bytes() for path in state.glob("ledger.db*")}


def half_captured(root: Path) -> None:
    """Kill a run right after its first segment: some samples are stored, and some are not."""

    def plant() -> None:
        real = Ledger.commit_segment

        def commit(self: Ledger, *arguments: Any, **options: Any) -> Commit:
            real(self, *arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("killed")

        Ledger.commit_segment = commit  # type: ignore[method-assign]

    # a segment closes with its first sample, however fast this machine captures
    code = run_child(root, prepare=plant, overrides=("store.segment_seconds=0.000001",))
    assert code == KILLED, error_of(root)
    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        counts = ledger.counts()
    assert counts["stored"].samples
    assert counts["pending"].samples + counts["in_flight"].samples


def test_temporary_places_are_wiped(model: Path, expected: dict[str, Any], place: Path) -> None:
    root, temporary, shared = small_project(place / "p", model), place / "tmp", place / "shm"
    wiped = removed = 0
    for folder in (temporary, shared):
        folder.mkdir()

    def elsewhere() -> None:
        for folder in (temporary, shared):
            (folder / "in use").write_text("something that the run itself put there")
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        os.chdir(shared)

    child = start_child(root, elsewhere)
    while not ended(child):
        for folder in (temporary, shared):
            for path in folder.iterdir():
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
                removed += 1
            wiped += 1
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, error_of(root)
    assert outcome(root) == expected
    print(f"{wiped} wipes, {removed} files and folders removed")
    assert wiped >= 10
    assert removed >= 2


@pytest.mark.parametrize("years", [10, -10])
def test_the_clock_moves(years: int, model: Path, expected: dict[str, Any], place: Path) -> None:
    root = small_project(place / "p", model)
    half_done(root, random.Random(SEED))

    def moved() -> None:
        shift, real_time = timedelta(days=365 * years), time.time
        text = (datetime.now(UTC) + shift).isoformat().replace("+00:00", "Z")
        for module in list(sys.modules.values()):
            if getattr(module, "utc_now_text", None) is clock.utc_now_text and module is not clock:
                module.utc_now_text = lambda: text  # type: ignore[attr-defined]
        clock.utc_now_text = lambda: text
        time.time = lambda: real_time() + shift.total_seconds()

    assert run_child(root, prepare=moved) == 0, error_of(root)
    told = [event["at"] for event in read_events(attempt_folders(Layout(root).logs)[-1])]
    years_told = {int(str(at)[:4]) - datetime.now(UTC).year for at in told}
    assert years_told <= {years, years - 1, years + 1}, "the run did not see the moved clock"
    assert outcome(root) == expected
    assert run_child(root) == 0, error_of(root)


def test_the_ledger_is_deleted_or_old(model: Path, expected: dict[str, Any], place: Path) -> None:
    rng, faults = random.Random(SEED), 0
    for number, old in enumerate((False, True) * (10 if LONG else 1)):
        root = small_project(place / f"p{number}", model)
        layout = Layout(root)
        child = start_child(root)
        await_stage(root, child, "extract")
        time.sleep(rng.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kept = Path(shutil.copytree(layout.state, place / f"state{number}"))
        while ledger_of(layout.state) == ledger_of(
            kept
        ):  # a run that is killed early may write nothing into it
            half_done(root, rng)
        before = ledger_of(layout.state)
        for path in layout.state.glob("ledger.db*"):
            path.unlink()
        if old:
            for path in kept.glob("ledger.db*"):
                shutil.copy(path, layout.state)
        faults += before != ledger_of(layout.state)
        assert run_child(root) == 0, error_of(root)
        assert outcome(root) == expected, f"seed {SEED}, {number}, old: {old}"
    print(f"seed {SEED}: {faults} ledgers lost or old")
    assert faults == (20 if LONG else 2)


def test_the_folder_is_moved(model: Path, expected: dict[str, Any], place: Path) -> None:
    root = small_project(place / "p", model)
    half_done(root, random.Random(SEED))
    (place / "elsewhere").mkdir()
    moved = Path(shutil.move(root, place / "elsewhere" / "of another name"))
    assert run_child(moved) == 0, error_of(moved)
    assert outcome(moved) == expected


def states(root: Path) -> dict[str, Any]:
    layout = Layout(root)
    with Ledger.open_read_only(layout.ledger) as ledger:
        reader = StoreReader(layout.segments, ledger)
        return {name: np.array(reader.sample(name).aux.array) for name in reader.ids()}


def test_other_batches_and_segments(model: Path, finished: Path, place: Path) -> None:
    root = small_project(place / "p", model)
    half_captured(root)
    changes = ("extract.batch_tokens=90", "store.segment_mib=2", "store.segment_seconds=1")
    code = run_child(root, overrides=changes)
    assert code == 0, error_of(root)
    ours, theirs = states(root), states(finished)
    assert ours.keys() == theirs.keys()
    events = read_events(attempt_folders(Layout(root).logs)[-1])
    assert any("batches of up to 90 tokens" in str(event.get("text")) for event in events)
    for name, array in theirs.items():
        error = np.linalg.norm(ours[name] - array) / np.linalg.norm(array)
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_sigterm_stops_soon_and_loses_nothing(
    stage: str, model: Path, expected: dict[str, Any], place: Path
) -> None:
    for number in range(TRIES):  # the last stages are over soon: the signal has to come before
        root = small_project(place / f"p{number}", model)
        child = start_child(root)
        await_stage(root, child, stage)
        alive = not ended(child)
        os.kill(child, signal.SIGTERM)
        if alive:
            break
        os.waitpid(child, 0)
    assert alive, "it always ended before the signal"
    asked = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert time.monotonic() - asked < 30
    # the last stage may have ended before it looked
    assert code in ((143, 0) if stage == "export" else (143,)), error_of(root)
    assert run_child(root) == 0, error_of(root)
    assert outcome(root) == expected


def test_a_second_signal_ends_at_once(model: Path, expected: dict[str, Any], place: Path) -> None:
    for number in range(TRIES):
        root = small_project(place / f"p{number}", model)
        child = start_child(root)
        await_stage(root, child, "extract")
        os.kill(child, signal.SIGTERM)
        time.sleep(0.01)
        alive = not ended(child)
        os.kill(child, signal.SIGTERM)
        if alive:
            break
        os.waitpid(child, 0)
    assert alive, "the first signal always ended it before the second"
    asked = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143, error_of(root)
    assert time.monotonic() - asked < 5
    assert run_child(root) == 0, error_of(root)
    assert outcome(root) == expected


def test_an_empty_mount_point_is_never_written_to(model: Path, expected: dict[str, Any], place: Path) -> None:
    root = small_project(place / "p", model)
    layout = Layout(root)
    with tmpfs(layout.store, "size=64m"):
        half_done(root, random.Random(SEED))
        with Ledger.open_read_only(layout.ledger) as ledger:
            if not ledger.segments():
                assert run_child(root) == 0
        kept = Path(shutil.copytree(layout.store, place / "disk"))
    assert list(kept.glob("segments/seg-*")), "nothing was stored on the disk that is gone now"
    assert not os.path.ismount(layout.store)
    code = run_child(root)
    assert code == StoreNotMounted.exit_code, error_of(root)
    assert "another disk" in error_of(root)
    assert "mount" in error_of(root)
    for words in (("verify",), ("verify", "--deep"), ("store", "repair"), ("store", "repair", "--dry-run"),
                  ("store", "compact"), ("store", "gc", "--yes")):  # fmt: skip
        done = eyas(*words, "--project", root)
        assert done.code == StoreNotMounted.exit_code, f"{words}: {done.err}"
        assert "another disk" in done.err, words
    assert list(layout.store.iterdir()) == []
    with tmpfs(layout.store, "size=65m"):
        # another disk with the same content: recognised, hashed, and gone on with
        shutil.copytree(kept, layout.store, dirs_exist_ok=True)
        assert run_child(root) == 0, error_of(root)
        said = [e for f in attempt_folders(layout.logs) for e in read_events(f) if e["event"] == "message"]
        assert any("every segment is hashed" in str(e["text"]) for e in said)
        assert outcome(root) == expected
        assert run_child(root) == 0


def test_a_changed_disk_is_scrubbed(finished: Path, expected: dict[str, Any], place: Path) -> None:
    """A flipped bit that came with the move is found before anything is built on it."""
    root = Path(shutil.copytree(finished, place / "p", symlinks=True))
    layout = Layout(root)
    kept = Path(shutil.move(layout.store, place / "kept"))
    with tmpfs(layout.store, "size=64m"):
        shutil.copytree(kept, layout.store, dirs_exist_ok=True)
        segment = sorted(layout.segments.iterdir())[0]
        data = bytearray(segment.read_bytes())
        data[-7] ^= 4
        segment.write_bytes(data)
        assert run_child(root) == 0, error_of(root)
        assert [p.name for p in layout.set_aside.iterdir() if segment.name in p.name]
        assert outcome(root) == expected
