"""Training in several real processes: started by eyas itself, and by an outer torchrun."""

from __future__ import annotations

import contextlib
import json
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
from eyas.drafter.schedule import TrainingPlan, dealt_out
from eyas.drafter.vocabulary import load_vocabulary
from eyas.pipeline.order import STAGES
from eyas.stages.project import Project
from eyas.stages.train import work
from eyas.stages.train.launch import Helpers
from eyas.stages.train.meeting import LOCAL, Board
from eyas.stages.train.outer import OuterPlace
from eyas.store.ledger import Ledger
from tests.base.test_ending import run_child
from tests.drafter.test_trainer import rows_of
from tests.faults.forked import error_of, run_here
from tests.projects import make_project, tiny_target, weights_digest

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


def test_a_lost_vocabulary_comes_back_from_a_checkpoint(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = [stage for stage in STAGES if stage.name == "train"]
    assert run_here(project, train, ("drafter.vocab_size=40",)) == 0, error_of(project)
    layout = Layout(project)
    before = load_vocabulary(layout.vocabulary)
    assert before.size == 40
    digest = weights_digest(project)
    shutil.rmtree(layout.vocabulary)
    for folder in list_checkpoints(layout.checkpoints)[-1:]:
        shutil.rmtree(folder)  # so that there is something left to train
    # what the data would suggest now is not asked
    monkeypatch.setattr(work, "build_vocabulary", None)
    assert run_here(project, train, ("drafter.vocab_size=40",)) == 0, error_of(project)
    assert load_vocabulary(layout.vocabulary) == before
    assert weights_digest(project) == digest


def flip_sample(root: Path, sample: str) -> Path:
    """Flip one bit of a stored sample; returns its segment."""
    layout = Layout(root)
    with Ledger.open_read_only(layout.ledger) as ledger:
        path = layout.segments / dict(ledger.stored())[sample]
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + size])[f"{sample}/aux"]["data_offsets"]
    data[8 + size + start + 5] ^= 2
    path.write_bytes(data)
    return path


def test_damage_that_a_helper_finds_is_mended(project: Path) -> None:
    train = [stage for stage in STAGES if stage.name in ("prepare", "regenerate", "extract", "train")]
    assert run_here(project, train, TWO) == 0, error_of(project)
    layout, digest = Layout(project), weights_digest(project)
    shutil.rmtree(list_checkpoints(layout.checkpoints)[-1])  # something is left to train, without a new start
    step = read_checkpoint(list_checkpoints(layout.checkpoints)[-1]).state.step
    with Ledger.open_read_only(layout.ledger) as ledger:
        entries = [entry for entry in ledger.entries() if entry.split == "train"]
    lengths = {entry.id: entry.length for entry in entries}
    costs = {entry.id: entry.length + 4.0 * 3 * entry.num_supervised for entry in entries}
    plan = TrainingPlan(lengths, epochs=2, batch_tokens=160, accumulate=2, seed=0)
    of_helper = dealt_out(plan.steps[step], lengths, costs, 160, 2)[1][0][0]
    segment = flip_sample(project, of_helper)
    assert run_here(project, train, TWO) == 0, error_of(project)
    assert [path for path in layout.set_aside.iterdir() if segment.name in path.name]
    assert weights_digest(project) == digest
    said = "".join(path.read_text() for path in layout.logs.glob("attempt-*/rank-1.log"))
    assert "SegmentDamaged" in said


def test_a_killed_helper_ends_all_soon_with_the_state_saved(project: Path) -> None:
    child = eyas_train(project, LONG)
    await_step(project, child, 3)
    (helper,) = helpers_of(child)
    helper.kill()
    killed = time.monotonic()
    output, _ = child.communicate(timeout=60)
    seconds = time.monotonic() - killed
    print(f"ended {seconds:.1f} s after a helper was killed")
    assert seconds < 20
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
    together = [psutil.Process(child.pid), *helpers]
    addresses = {
        c.laddr.ip.removeprefix("::ffff:") for process in together for c in process.net_connections()
    }
    assert addresses == {LOCAL}  # nobody else is to reach them
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


def test_a_process_that_met_others_leaves_without_their_threads() -> None:
    """Where the process ends as Python ends, what is left behind aborts it."""
    there = "from eyas.stages.train.meeting import Board, leave"
    met = f"{there}; Board.of_this_machine().join(0, 1, 'cpu', 'alone'); leave()"
    codes = [run_child(said, "sys.exit(7)").returncode for said in (met, there)]
    assert codes == [7, -signal.SIGABRT]


def test_an_error_is_told_as_the_class_it_is() -> None:
    board = Board.of_this_machine()
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == board.port]
    assert set(listening) == {LOCAL}
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
        with pytest.raises(WorkerLost, match=r"training process [12] .* ended with exit code 1"):
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


def test_a_process_that_has_noticed_is_left_in_peace(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    helpers = Helpers(Project.open(project), 2, 1, tmp_path / "logs")
    try:
        with helpers.watched(SilentProgress(), 1.5):
            reason = helpers.reason()
            assert reason is not None
            assert "training process 1" in reason.what
            time.sleep(3)  # as long as saving takes
    finally:
        helpers.end(1.0)


def test_a_process_that_waits_for_a_dead_one_is_ended(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is between GPUs, where nothing breaks off the wait for a peer."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):

            class Told(SilentProgress):
                def say(self, message: str) -> None:
                    (tmp_path / "said").write_text(message)

            helpers = Helpers(Project.open(project), 2, 1, tmp_path / "logs")
            with helpers.watched(Told(), 0.2):
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
