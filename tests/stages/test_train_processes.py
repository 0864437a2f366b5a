"""Training in several real processes: started by eyas itself, and by an outer torchrun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from eyas.base.errors import EyasError, SegmentDamaged, Stopped, WorkerLost
from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.drafter.checkpoint import list_checkpoints, read_checkpoint
from eyas.pipeline.order import STAGES
from eyas.stages.project import Project
from eyas.stages.train import launch
from eyas.stages.train.launch import LOCAL, Helpers
from eyas.stages.train.meeting import Board
from eyas.stages.train.outer import OuterPlace
from tests.drafter.test_trainer import rows_of
from tests.faults.forked import error_of, run_here
from tests.projects import make_project, tiny_target

TWO = ("train.processes=2", "train.accumulate=2", "train.dtype=float64")
LONG = (*TWO, "train.epochs=500", "train.checkpoint_minutes=60")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose samples are captured; nothing is trained yet."""
    folder = tmp_path_factory.mktemp("captured")
    root = make_project(folder / "p", tiny_target(folder / "model"))
    stages = [stage for stage in STAGES if stage.name in ("prepare", "regenerate", "extract")]
    assert run_here(root, stages) == 0, error_of(root)
    return root


@pytest.fixture
def project(captured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(captured, tmp_path / "p", symlinks=True))


def eyas_train(root: Path, overrides: tuple[str, ...], *launcher: str) -> subprocess.Popen[str]:
    words = ["train", "--project", str(root), *(f"--set={value}" for value in overrides)]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "eyas", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def await_step(root: Path, child: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            if len(rows_of(root / "drafter", "train")) >= step:
                return
        time.sleep(0.02)
    child.kill()
    raise AssertionError(f"no step {step}: {child.communicate()[0]}")


def helpers_of(child: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(child.pid).children(recursive=True)
    return [process for process in found if "eyas.stages.train.worker" in " ".join(process.cmdline())]


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


def weights(root: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(list_checkpoints(Layout(root).checkpoints)[-1]).model


def test_two_processes_train_what_one_trains(project: Path, captured: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(captured, tmp_path / "alone", symlinks=True))
    train = [stage for stage in STAGES if stage.name == "train"]
    assert run_here(alone, train, ("train.accumulate=2", "train.dtype=float64")) == 0, error_of(alone)
    for overrides in (TWO, (*TWO, "train.sharding=fsdp")):
        root = Path(shutil.copytree(captured, tmp_path / overrides[-1].split("=")[1], symlinks=True))
        assert run_here(root, train, overrides) == 0, error_of(root)
        for name, tensor in weights(alone).items():
            torch.testing.assert_close(weights(root)[name], tensor, rtol=1e-9, atol=1e-9)
        steps, expected = rows_of(root / "drafter", "train"), rows_of(alone / "drafter", "train")
        assert [row["supervised_rows"] for row in steps] == [row["supervised_rows"] for row in expected]
        # another number of processes is no other recipe: all is done
        assert run_here(root, train, ("train.accumulate=2", "train.dtype=float64")) == 0
        assert len(rows_of(root / "drafter", "train")) == len(steps)


def test_a_killed_helper_ends_all_soon_with_the_state_saved(project: Path) -> None:
    child = eyas_train(project, LONG)
    await_step(project, child, 3)
    (helper,) = helpers_of(child)
    helper.kill()
    killed = time.monotonic()
    output, _ = child.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert child.returncode == WorkerLost.exit_code, output
    assert "ended by signal SIGKILL" in output
    assert "rank-1.log" in output
    saved = list_checkpoints(Layout(project).checkpoints)
    # nothing asked for a checkpoint yet: this one was made on the way out, of the last whole step
    assert [path.name for path in saved] == [f"step-{rows_of(project / 'drafter', 'train')[-1]['step']:08d}"]


def test_sigterm_saves_and_leaves_nobody_behind(project: Path) -> None:
    child = eyas_train(project, LONG)
    await_step(project, child, 3)
    helpers = helpers_of(child)
    child.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    output, _ = child.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    assert child.returncode == 143, output
    assert helpers
    assert all_gone(helpers, 1)
    last = rows_of(project / "drafter", "train")[-1]["step"]
    assert list_checkpoints(Layout(project).checkpoints)[-1].name == f"step-{last:08d}"


def test_helpers_end_with_the_first_process(project: Path) -> None:
    child = eyas_train(project, LONG)
    await_step(project, child, 1)
    helpers = helpers_of(child)
    child.kill()
    child.communicate()
    assert helpers
    assert all_gone(helpers, 10)


def test_an_outer_torchrun(project: Path, captured: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone")
    overrides = ("train.accumulate=2", "train.dtype=float64")
    child = eyas_train(project, overrides, *launcher)
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 0, output
    ours = Path(shutil.copytree(captured, tmp_path / "own", symlinks=True))
    assert run_here(ours, [stage for stage in STAGES if stage.name == "train"], TWO) == 0, error_of(ours)
    for name, tensor in weights(ours).items():
        assert torch.equal(weights(project)[name], tensor), name
    # again: the first finds nothing to do and lets the other go
    child = eyas_train(project, overrides, *launcher)
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 0, output
    assert "done already" in output


def test_an_error_is_told_as_the_class_it_is() -> None:
    board = Board(LOCAL, 0, serve=True)
    other = Board(LOCAL, board.port, serve=False)
    assert board.told_by(1) is None
    other.tell(1, SegmentDamaged("a segment is damaged", where="seg-7", why="hash", hint="eyas run"), None)
    told = board.told_by(1)
    assert type(told) is SegmentDamaged
    assert (told.what, told.where, told.why, told.hint) == (
        "a segment is damaged",
        "seg-7",
        "hash",
        "eyas run",
    )
    other.tell(2, ZeroDivisionError("by zero"), Path("rank-2.log"))
    told = board.told_by(2)
    assert type(told) is EyasError
    assert told.why == "ZeroDivisionError: by zero"
    assert told.where == "rank-2.log"


def test_a_helper_that_cannot_start_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    helpers = Helpers(Project.open(project), 3, 1, tmp_path / "logs")
    try:
        with pytest.raises(WorkerLost, match="training process 1 .* ended with exit code 1"):
            helpers.await_ready(StopFlag())
    finally:
        helpers.end(1.0)


def test_a_stop_is_heard_while_helpers_start(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("yes"))  # never says that it is ready
    helpers = Helpers(Project.open(project), 2, 1, tmp_path / "logs")
    stop = StopFlag()
    stop.request(15)
    try:
        with pytest.raises(Stopped):
            helpers.await_ready(stop)
    finally:
        began = time.monotonic()
        helpers.end(0.2)
    assert time.monotonic() - began < 5


def test_a_process_that_waits_for_a_dead_one_is_ended(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is between GPUs, where nothing breaks off the wait for a peer."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):

            class Told(SilentProgress):
                def say(self, message: str) -> None:
                    (tmp_path / "said").write_text(message)

            helpers = Helpers(Project.open(project), 2, 1, tmp_path / "logs")
            with helpers.watched(Told()):
                threading.Event().wait(60)
        os._exit(7)
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == WorkerLost.exit_code
    assert time.monotonic() - began < 10
    assert "training process 1" in (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, None),
        (
            {
                "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
                "MASTER_ADDR": "a", "MASTER_PORT": "5",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
            },
            OuterPlace(5, 8, 1, 4, "a", 5, True, 2),
        ),
    ],
)  # fmt: skip
def test_the_place_that_a_launcher_gives(
    values: dict[str, str], expected: OuterPlace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert OuterPlace.here() == expected
