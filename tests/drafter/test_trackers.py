"""Trackers: real ones where they are installed, and a fake one for what goes wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
import types

import pytest

from eyas.base.errors import ConfigError
from eyas.drafter.trackers import follower, kinds
from eyas.drafter.trackers.follower import following
from eyas.drafter.trackers.interface import TrackedRun
from eyas.drafter.trackers.rows import row_values

AT = "2026-11-30T07:00:00.000Z"
SECONDS = 1796022000.0


def train_row(step, loss):
    return {
        "kind": "train", "step": step, "at": AT, "loss": loss, "step_loss": [loss, None, 2 * loss],
        "grad_norm": {"fc": 0.5}, "note": "text", "lr": float("nan"),
    }  # fmt: skip


def validation_row(step, tau):
    return {"kind": "validation", "step": step, "at": AT, "walk_tau": tau, "bad_samples": []}


def write(path, *rows):
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


@pytest.fixture
def run(tmp_path):
    return TrackedRun("falcon", tmp_path / "trackers", {"train.lr": 0.001})


@pytest.fixture
def silent():
    """A listener for tests in which nothing is to be said."""
    said = []
    yield said.append
    assert said == []


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


class Fake:
    """Keeps what it is told, across sittings by its name."""

    kept: dict[str, list] = {}  # noqa: RUF012

    def __init__(self, resumed, *, fails_at=None, slow=0.0):
        self.run = resumed or f"run-{len(Fake.kept)}"
        Fake.kept.setdefault(self.run, [])
        self.fails_at, self.slow, self.flushed = fails_at, slow, 0

    def log(self, step, values, at):
        if step == self.fails_at:
            raise ConnectionError("the server is gone\nsecond line")
        time.sleep(self.slow)
        Fake.kept[self.run].append((step, values, at))

    def flush(self):
        self.flushed += 1

    def close(self):
        Fake.kept[self.run].append("closed")


@pytest.fixture
def fakes(monkeypatch):
    """Adapters by name in place of the real ones; the dict may be changed by a test."""
    made = dict.fromkeys(("wandb", "mlflow"), Fake)
    Fake.kept = {}
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(follower, "open_tracker", lambda name, run, resumed: made[name](resumed))
    return made


def test_numbers_of_a_row_by_name():
    assert row_values(train_row(3, 1.5)) == {
        "train/loss": 1.5,
        "train/step_loss/0": 1.5,
        "train/step_loss/2": 3.0,
        "train/grad_norm/fc": 0.5,
    }


def test_half_a_row_is_left_until_it_is_whole(run, metrics, fakes, silent):
    text = json.dumps(train_row(2, 3.0)) + "\n"
    with following(metrics, run, ["wandb"], silent):
        write(metrics, train_row(1, 4.0))
        with metrics.open("a") as file:
            file.write(text[:20])
        deadline = time.monotonic() + 5
        while not Fake.kept.get("run-0") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # some looks at the half row
        with metrics.open("a") as file:
            file.write(text[20:])
    assert [told if told == "closed" else told[0] for told in Fake.kept["run-0"]] == [1, 2, "closed"]


def test_rows_arrive_while_training_goes_on_and_the_last_at_its_end(run, metrics, fakes, silent):
    with following(metrics, run, ["wandb"], silent):
        write(metrics, train_row(1, 4.0))
        deadline = time.monotonic() + 5
        while not Fake.kept.get("run-0") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [told[0] for told in Fake.kept["run-0"]] == [1]
        write(metrics, train_row(2, 3.0), validation_row(2, 1.7))
    assert [told if told == "closed" else told[0] for told in Fake.kept["run-0"]] == [1, 2, 2, "closed"]
    assert Fake.kept["run-0"][2] == (2, {"validation/walk_tau": 1.7}, SECONDS)


def test_a_resumed_run_goes_on_and_gets_each_step_once(run, metrics, fakes, silent):
    write(metrics, *(train_row(step, 4.0) for step in (1, 2, 3)))
    with following(metrics, run, ["wandb"], silent):
        pass
    # back to the checkpoint at step 1, a row torn by the kill, a validation that was lost with it
    with metrics.open("a") as file:
        file.write('{"kind": "train", "st\n')
    write(metrics, train_row(2, 4.0), validation_row(2, 1.5), train_row(3, 4.0), train_row(4, 3.9))
    with following(metrics, run, ["wandb", "mlflow"], silent):
        pass
    steps = [told[0] for told in Fake.kept["run-0"] if told != "closed"]
    assert steps == [1, 2, 3, 2, 4]
    assert [told[0] for told in Fake.kept["run-1"] if told != "closed"] == [1, 2, 3, 2, 4], (
        "a new one has all"
    )
    assert set(json.loads((run.folder / "runs.json").read_text())) == {"wandb", "mlflow"}


def test_a_failing_tracker_is_said_once_and_the_others_go_on(run, metrics, fakes):
    fakes["wandb"] = lambda resumed: Fake(resumed, fails_at=2)
    said = []
    write(metrics, *(train_row(step, 4.0) for step in range(1, 6)))
    with following(metrics, run, ["wandb", "mlflow"], said.append):
        pass
    assert said == ["tracker wandb failed and is left out: ConnectionError: the server is gone"]
    assert [told[0] for told in Fake.kept["run-0"]] == [1]
    assert [told[0] for told in Fake.kept["run-1"] if told != "closed"] == [1, 2, 3, 4, 5]
    # next time it is tried again, from where it failed
    fakes["wandb"] = Fake
    with following(metrics, run, ["wandb"], said.append):
        pass
    assert [told[0] for told in Fake.kept["run-0"] if told != "closed"] == [1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_be_opened_ends_nothing(run, metrics, fakes):
    def broken(resumed):
        raise RuntimeError

    fakes["wandb"] = broken
    said = []
    write(metrics, train_row(1, 4.0))
    with following(metrics, run, ["wandb"], said.append):
        pass
    assert said == ["tracker wandb failed and is left out: RuntimeError: RuntimeError"]


def test_a_tracker_that_hangs_does_not_hold_the_end_up(run, metrics, fakes, monkeypatch):
    monkeypatch.setattr(follower, "CLOSE_SECONDS", 0.2)
    hanging = threading.Event()

    class Hanging(Fake):
        def log(self, step, values, at):
            hanging.wait(20)

    fakes["wandb"] = Hanging
    said = []
    write(metrics, train_row(1, 4.0))
    started = time.monotonic()
    with following(metrics, run, ["wandb"], said.append):
        pass
    assert time.monotonic() - started < 5
    assert len(said) == 1
    assert "did not finish" in said[0]
    hanging.set()


def test_training_that_fails_fails_as_it_did(run, metrics, fakes, silent):
    with pytest.raises(ZeroDivisionError), following(metrics, run, ["wandb"], silent):
        raise ZeroDivisionError


def test_without_trackers_nothing_is_written(run, metrics, silent):
    with following(metrics, run, [], silent):
        write(metrics, train_row(1, 4.0))
    assert not run.folder.exists()


def test_a_missing_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name in ("wandb", "mlflow") else object())
    kinds.require_trackers(["tensorboard"])
    with pytest.raises(ConfigError) as caught:
        kinds.require_trackers(["tensorboard", "wandb", "mlflow"])
    assert "wandb, mlflow" in caught.value.what
    assert "pip install 'eyas[wandb,mlflow]'" in caught.value.hint


def sit_twice(run, metrics, name):
    said = []
    write(metrics, train_row(1, 4.0), train_row(2, 3.0))
    with following(metrics, run, [name], said.append):
        pass
    write(metrics, train_row(2, 3.0), train_row(3, 2.0), validation_row(3, 1.7))
    with following(metrics, run, [name], said.append):
        pass
    assert said == []


LOSSES = [(1, 4.0), (2, 3.0), (3, 2.0)]


def test_tensorboard(run, metrics):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sit_twice(run, metrics, "tensorboard")
    read = EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    events = read.Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == LOSSES
    assert events[0].wall_time == SECONDS
    assert [event.value for event in read.Scalars("train/step_loss/2")] == [8.0, 6.0, 4.0]
    assert [event.value for event in read.Scalars("validation/walk_tau")] == [pytest.approx(1.7)]


def test_mlflow(run, metrics, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    from eyas.drafter.trackers.mlflow_tracker import local_place

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sit_twice(run, metrics, "mlflow")
    client = MlflowClient(local_place(run))
    experiment = client.get_experiment_by_name("falcon")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == LOSSES
    assert found.data.params == {"train.lr": "0.001"}
    assert found.info.status == "FINISHED"


def test_wandb_offline(run, metrics, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    sit_twice(run, metrics, "wandb")
    sittings = sorted((run.folder / "wandb" / "wandb").glob("offline-run-*"))
    assert len(sittings) == 2
    assert len({sitting.name.rpartition("-")[2] for sitting in sittings}) == 1, "one run in two sittings"
    files = [next(sitting.glob("run-*.wandb")) for sitting in sittings]
    deadline = time.monotonic() + 20  # its own process writes them, and may still be at it
    while b"validation/walk_tau" not in files[1].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(b"train/loss" in file.read_bytes() for file in files)
    assert b"validation/walk_tau" in files[1].read_bytes()
    assert b"validation/walk_tau" not in files[0].read_bytes()


def test_trackio(run, metrics, monkeypatch, tmp_path):
    if "trackio" not in sys.modules:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    sit_twice(run, metrics, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("falcon")
    assert json.loads((run.folder / "runs.json").read_text())["trackio"]["run"] == name
    rows = SQLiteStorage.get_logs("falcon", name)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == LOSSES
    assert isinstance(trackio, types.ModuleType)
