"""Checkpoints written beside training, and killed runs that lose nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import threading
import time

import pytest
import torch

from eyas.base import seal
from eyas.base.errors import Stopped
from eyas.drafter import keeper as keeper_module
from eyas.drafter.checkpoint import (
    TrainingState,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    save_checkpoint,
)
from eyas.drafter.keeper import CheckpointKeeper
from eyas.drafter.snapshot import take_snapshot
from eyas.drafter.stepping import make_optimizer
from eyas.drafter.vocabulary import load_vocabulary
from tests.drafter.cases import make_drafter, make_vocabulary
from tests.drafter.ranks import in_ranks
from tests.drafter.test_trainer import SETTINGS, assert_same, one_thread, rows_of, trainer

_ = one_thread
MANY = dataclasses.replace(SETTINGS, epochs=40, checkpoint_steps=1, batch_tokens=45, validations=1)
NUM_KILLS = 100


def a_state(step):
    return TrainingState(step, 9, 0, 0, 0, 0, make_drafter().shape.as_dict(), {}, "", {})


def a_drafter():
    drafter = make_drafter(dtype=torch.float32)
    optimizer = make_optimizer(drafter, SETTINGS)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return drafter, optimizer


def test_a_snapshot_does_not_move_with_training():
    drafter, optimizer = a_drafter()
    snapshot = take_snapshot(drafter, optimizer)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    squares = {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in drafter.named_parameters()}
    optimizer.step()
    assert snapshot.model.keys() == before.keys()
    assert all(torch.equal(snapshot.model[name], before[name]) for name in before)
    assert all(torch.equal(snapshot.optimizer[f"square/{name}"], squares[name]) for name in squares)
    assert not torch.equal(drafter.state_dict()["norm.weight"], before["norm.weight"])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """One at a time: the second waits for the first, the caller for neither until then."""
    gate, real, running, most = threading.Event(), save_checkpoint, [], []

    def slow(folder, snapshot, state, vocabulary):
        running.append(state.step)
        most.append(len(running))
        assert gate.wait(20)
        path = real(folder, snapshot, state, vocabulary)
        running.remove(state.step)
        return path

    monkeypatch.setattr(keeper_module, "save_checkpoint", slow)
    drafter, optimizer = a_drafter()
    keeper, state = CheckpointKeeper(tmp_path, 5, make_vocabulary()), a_state(1)
    keeper.start(take_snapshot(drafter, optimizer), state, time.monotonic())
    state.step, state.tokens = 2, 77  # training moves on
    assert keeper.finished() == []
    assert list_checkpoints(tmp_path) == []
    threading.Timer(0.3, gate.set).start()
    began = time.monotonic()
    keeper.start(take_snapshot(drafter, optimizer), state, time.monotonic())
    assert time.monotonic() - began > 0.2
    keeper.wait()
    assert most == [1, 1]
    done = keeper.finished()
    assert [(written.step, written.path.name) for written in done] == [
        (1, "step-00000001"), (2, "step-00000002"),
    ]  # fmt: skip
    assert read_checkpoint(checkpoint_path(tmp_path, 1)).state == a_state(1)
    assert load_vocabulary(checkpoint_path(tmp_path, 2)) == make_vocabulary()
    assert done[1].seconds > 0.2  # training stood still
    assert done[0].write_seconds > 0.2 > done[0].seconds


def test_an_error_of_the_disk_is_raised_once_and_leaves_nothing(tmp_path, monkeypatch):
    drafter, optimizer = a_drafter()
    keeper = CheckpointKeeper(tmp_path, 5, make_vocabulary())
    keeper.start(take_snapshot(drafter, optimizer), a_state(1), time.monotonic())
    keeper.wait()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seal.os, "fsync", full)
    keeper.start(take_snapshot(drafter, optimizer), a_state(2), time.monotonic())
    with pytest.raises(OSError, match="No space"):
        keeper.wait()
    monkeypatch.undo()
    keeper.wait()
    assert [written.step for written in keeper.finished()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_of_the_format_before_is_read(tmp_path):
    """It has neither the losses that guards remember nor the draft vocabulary."""
    drafter, optimizer = a_drafter()
    save_checkpoint(tmp_path / "new", take_snapshot(drafter, optimizer), a_state(3), make_vocabulary())
    new = checkpoint_path(tmp_path / "new", 3)
    with seal.sealed_folder(checkpoint_path(tmp_path / "old", 3), {"step": 3, "total_steps": 9}) as folder:
        for name in ("model.safetensors", "optimizer.safetensors"):
            shutil.copy(new / name, folder)
        values = json.loads((new / "state.json").read_text())
        assert values.pop("recent_losses") == []
        assert values.pop("format") == 2
        (folder / "state.json").write_text(json.dumps({**values, "format": 1}))
    found = read_checkpoint(checkpoint_path(tmp_path / "old", 3))
    assert dataclasses.replace(found.state, format=2) == a_state(3)
    assert found.model.keys() == read_checkpoint(new).model.keys()


def stop_in_the_last_validation(folder, settings):
    """A run whose every step is done and whose last validation is not."""
    made, progress = trainer(folder, settings)
    validate, total = made._passes.validate, len(made._plan.steps)

    def stopped(source, stop, world):
        if progress.steps == total:
            progress.flag.request(15)
        return validate(source, stop, world)

    made._passes.validate = stopped
    with pytest.raises(Stopped):
        made.run()
    return total


def test_a_stop_before_the_last_validation_leaves_it_to_the_next_run(tmp_path):
    settings = dataclasses.replace(SETTINGS, checkpoint_steps=3, keep_checkpoints=1, validations=1)
    whole = trainer(tmp_path / "whole", settings)[0].run()
    total = stop_in_the_last_validation(tmp_path / "stopped", settings)
    folder = tmp_path / "stopped" / "checkpoints"
    last = list_checkpoints(folder)
    # the one before stays, since the newest will be replaced
    assert [path.name for path in last] == [f"step-{total - total % 3:08d}", f"step-{total:08d}"]
    assert read_checkpoint(last[-1]).state.unvalidated
    assert seal.read_seal(last[-1])["about"]["unvalidated"]
    result = trainer(tmp_path / "stopped", settings)[0].run()
    assert result.state.validation == whole.state.validation
    assert_same(result.last, whole.last)
    assert [path.name for path in folder.iterdir()] == [result.last.name]
    assert len(rows_of(tmp_path / "stopped", "validation")) == 1


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_one_before(tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, checkpoint_steps=3, keep_checkpoints=1, validations=1)
    whole = trainer(tmp_path / "whole", settings)[0].run()
    total = stop_in_the_last_validation(tmp_path / "stopped", settings)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seal.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        trainer(tmp_path / "stopped", settings)[0].run()
    monkeypatch.undo()
    left = list_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert f"step-{total - total % 3:08d}" in [path.name for path in left]
    assert_same(trainer(tmp_path / "stopped", settings)[0].run().last, whole.last)


def test_checkpoints_by_step(tmp_path):
    settings = dataclasses.replace(SETTINGS, checkpoint_steps=3, keep_checkpoints=100, validations=1)
    made, _ = trainer(tmp_path, settings)
    total = made.run().state.total_steps
    steps = [*range(3, total, 3), total]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        f"step-{step:08d}" for step in steps
    ]
    rows = rows_of(tmp_path, "checkpoint")
    assert [row["step"] for row in rows] == steps
    assert all(row["seconds"] >= 0 and row["write_seconds"] > 0 for row in rows)


def test_a_stop_amid_a_long_step_drops_it_and_saves(tmp_path):
    """A step of many batches is not awaited: nothing of it has moved the weights."""
    settings = dataclasses.replace(SETTINGS, batch_tokens=10, accumulate=10, epochs=2)
    whole = trainer(tmp_path / "whole", settings)[0].run()
    made, progress = trainer(tmp_path / "stopped", settings)
    count = [0]
    real = made._passes.loss

    def loss(batch, num_rows):
        count[0] += 1
        if count[0] == 13:  # the third batch of the second step
            progress.flag.request(15)
        return real(batch, num_rows)

    made._passes.loss = loss
    with pytest.raises(Stopped):
        made.run()
    assert count[0] == 13
    assert [path.name for path in list_checkpoints(tmp_path / "stopped" / "checkpoints")] == ["step-00000001"]
    assert_same(trainer(tmp_path / "stopped", settings)[0].run().last, whole.last)


def killed_after(made, progress, steps):
    """Train, and die by SIGKILL right after that many steps, whatever other threads are doing."""
    real = progress.advance

    def advance(units, **facts):
        real(units, **facts)
        if progress.steps == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    progress.advance = advance
    return made.run()


def test_killed_at_random_steps_the_weights_are_the_same(tmp_path):
    """100 kills -9 at random steps, whatever the writing thread is doing then."""
    whole = trainer(tmp_path / "whole", MANY)[0].run()
    rng, kills, runs = random.Random(20261130), 0, 0
    while kills < NUM_KILLS:
        folder = tmp_path / f"killed{runs}"
        runs += 1
        code = None
        while code != 0:
            steps = rng.randint(1, 5)
            child = os.fork()
            if child == 0:
                code = 70
                try:
                    torch.set_num_threads(1)
                    killed_after(*trainer(folder, MANY, weights_seed=kills), steps)
                    code = 0
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
        assert_same(list_checkpoints(folder / "checkpoints")[-1], whole.last)
    print(f"{kills} kills in {runs} runs of {whole.state.total_steps} steps")


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_killed_at_random_steps_end_in_the_same_bits(sharding, tmp_path):
    settings = dataclasses.replace(MANY, epochs=10, accumulate=2)

    def unbroken(world):
        trainer(tmp_path / "whole", settings, world=world, sharding=sharding)[0].run()

    in_ranks(2, unbroken)
    rng, kills = random.Random(sharding), 0
    while True:
        steps, victims = rng.randint(1, 5), rng.choice([{0}, {1}, {0, 1}])

        def work(world, steps=steps, victims=victims):
            made, progress = trainer(
                tmp_path / "killed", settings, world=world, sharding=sharding, weights_seed=world.rank
            )
            return killed_after(made, progress, steps if world.rank in victims else -1).state.step

        results = in_ranks(2, work, allow_death=True)
        if None not in results:
            break
        kills += 1
        assert kills < 60
    last = [list_checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("whole", "killed")]
    assert_same(*last)
    print(f"{kills} kills")
    assert kills >= 5
