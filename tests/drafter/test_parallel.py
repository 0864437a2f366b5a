"""Several processes do what one does, only sooner."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import Stopped, WorkerLost
from eyas.base.stop import StopFlag
from eyas.drafter.checkpoint import list_checkpoints, read_checkpoint
from eyas.drafter.model import EagleDrafter
from eyas.drafter.parallel import Parallel
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import PlannedStep, TrainingPlan, dealt_out
from eyas.drafter.settings import TrainSettings
from eyas.drafter.stepping import Stepper
from eyas.drafter.teacher import Teacher
from tests.drafter.cases import make_drafter, make_head, make_vocabulary
from tests.drafter.ranks import in_ranks
from tests.drafter.test_trainer import assert_same, one_thread, poisoned, rows_of, train_source, trainer

WIDE = TrainSettings(
    epochs=2,
    batch_tokens=30,
    accumulate=3,
    steps=3,
    lr=3e-3,
    weight_decay=0.1,
    checkpoint_minutes=1e9,
    validations=2,
    dtype="float64",
)
_ = one_thread


def make_passes(kind="mixed", norms="eagle3"):
    options = dataclasses.replace(WIDE, loss=kind)
    drafter = make_drafter(norms)
    teacher = Teacher(make_head(), make_vocabulary(), device=torch.device("cpu"), dtype=torch.float64)
    return BatchPasses(drafter, teacher, options)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(passes):
    return {name: whole(p.grad).numpy().copy() for name, p in passes.drafter.named_parameters()}


SHARES = {  # batches of each process
    "balanced": [[["t0", "t1"], ["t2"]], [["t3", "t4"], ["t5"]]],
    "one has none": [[["t0", "t1", "t2", "t3"], ["t4", "t5"]], []],
    "three, uneven": [[["t0"]], [["t1"], ["t2"], ["t3"]], [["t4", "t5"]]],
}


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", SHARES)
def test_gradients_are_those_of_the_union(case, sharding):
    shares, source = SHARES[case], train_source()
    names = [name for share in shares for ids in share for name in ids]
    norms = "eagle3.1" if case == "balanced" else "eagle3"
    alone = make_passes(norms=norms)
    union = alone.prepare(source, names)
    num_rows = union.num_supervised
    loss, _ = alone.train(union, num_rows)
    expected = gradients(alone)

    def work(world):
        passes = make_passes(norms=norms)
        parallel = Parallel(passes, world, sharding)
        assert sharding == "ddp" or passes.drafter.fc.weight.to_local().numel() < 12 * 36
        batches = [passes.prepare(source, ids) for ids in shares[world.rank]]
        found = []
        for _ in range(2):  # the second time, exchanges are planned by what was seen in the first
            sums = parallel.add_gradients(batches, num_rows, StopFlag())
            found.append((world.total([sums.loss])[0], gradients(passes)))
            passes.drafter.zero_grad(set_to_none=True)
        return found

    for found in in_ranks(len(shares), work):
        for total, ours in found:
            assert total == pytest.approx(loss, abs=1e-12)
            for name, gradient in expected.items():
                assert abs(ours[name] - gradient).max() < 1e-12 * max(1.0, abs(gradient).max()), name


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_run_is_that_of_one_process(size, sharding, tmp_path):
    alone = trainer(tmp_path / "alone", WIDE)[0].run()

    def work(world):
        # only the first writes, and only where it was told to
        made, progress = trainer(
            tmp_path / f"rank{world.rank}", WIDE, world=world, sharding=sharding, weights_seed=world.rank
        )
        result = made.run()
        return result.state, progress.done

    results = in_ranks(size, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "rank0"]
    for state, done in results:
        assert state == results[0][0]
        assert done == sum(train_source().lengths().values()) * 2
    ours = read_checkpoint(list_checkpoints(tmp_path / "rank0" / "checkpoints")[-1])
    theirs = read_checkpoint(alone.last)
    for left, right in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype
            torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-9)
    for kind in ("train", "validation"):
        pairs = zip(rows_of(tmp_path / "rank0", kind), rows_of(tmp_path / "alone", kind), strict=True)
        for one, other in pairs:
            assert one["step"] == other["step"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
            if kind == "train":
                assert one["supervised_rows"] == other["supervised_rows"]
                assert one["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-8)
            else:
                assert one["rows"] == other["rows"]
                assert one["walk_tau"] == other["walk_tau"]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(10, 50),
)
@settings(max_examples=200, deadline=None)
def test_a_step_is_dealt_out_whole_and_evenly(sizes, num_processes, accumulate, budget):
    lengths = {f"s{i:02d}": size for i, size in enumerate(sizes)}
    costs = {name: float(size * (1 + size % 7)) for name, size in lengths.items()}
    plan = TrainingPlan(lengths, epochs=1, batch_tokens=budget, accumulate=accumulate, seed=1)
    for step in plan.steps:
        dealt = dealt_out(step, lengths, costs, budget, num_processes)
        assert len(dealt) == num_processes
        assert sorted(n for share in dealt for ids in share for n in ids) == sorted(step.samples)
        for share in dealt:
            for ids in share:
                assert len(ids) == 1 or sum(lengths[name] for name in ids) <= budget
        if num_processes == 1:
            assert [tuple(ids) for ids in dealt[0]] == list(step.batches)
        shuffled = dict(reversed(lengths.items()))
        assert dealt == dealt_out(step, shuffled, costs, budget, num_processes)


def test_processes_get_equal_work():
    """1,000 samples of the lengths of real chats, a step of 8 batches for 8 processes."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(5.5, 0.8, 1000)).clip(20, 2048).astype(int)
    lengths = {f"s{i}": int(size) for i, size in enumerate(sizes)}
    shares = rng.uniform(0.05, 0.95, 1000)  # of the tokens that are supervised
    costs = {name: n * (1 + 28 * share) for (name, n), share in zip(lengths.items(), shares, strict=True)}
    plan = TrainingPlan(lengths, epochs=1, batch_tokens=2048, accumulate=8, seed=0)
    busiest = ideal = by_length = 0.0

    def loads_of(dealt):
        return [sum(costs[name] for ids in share for name in ids) for share in dealt]

    for step in plan.steps:
        loads = [
            [
                sum(costs[name] for ids in share for name in ids)
                for share in dealt_out(step, lengths, by, 2048, 8)
            ]
            for by in (costs, lengths)
        ]
        busiest, by_length = busiest + max(loads[0]), by_length + max(loads[1])
        # no way of dealing is better than the mean, or than the dearest sample
        ideal += max(sum(loads[0]) / 8, max(costs[name] for name in step.samples))
    assert busiest < 1.05 * ideal
    assert by_length > 1.15 * ideal  # what the rows' unequal cost is worth


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_poisoned_sample_of_one_process_is_skipped_by_all(sharding, tmp_path):
    source = poisoned(["t2"])
    options = dataclasses.replace(WIDE, warm_start="head", epochs=1)
    trainer(tmp_path / "alone", options, samples=source)[0].run()

    def work(world):
        made, progress = trainer(tmp_path / "two", options, samples=source, world=world, sharding=sharding)
        state = made.run().state
        return state.counters, progress.said

    results = in_ranks(2, work)
    skipped = rows_of(tmp_path / "two", "skipped")
    assert [row["samples"] for row in skipped] == [["t2"]]
    assert [row["step"] for row in skipped] == [row["step"] for row in rows_of(tmp_path / "alone", "skipped")]
    assert results[0][0] == results[1][0] == {"bad_steps": 1}
    assert any("t2" in said for said in results[0][1])


def test_culprits_are_found_in_sharded_weights():
    source = poisoned(["t2", "t5"])
    planned = PlannedStep(0, 0, (("t0", "t1", "t2"), ("t3", "t4", "t5")))

    def work(world):
        passes = make_passes()
        parallel = Parallel(passes, world, "fsdp")
        optimizer = torch.optim.AdamW(passes.drafter.parameters(), lr=1e-3, fused=True)
        lengths = source.lengths()
        stepper = Stepper(parallel, optimizer, source, lengths, lengths, passes.settings, StopFlag())
        before = {name: whole(p.detach()).clone() for name, p in passes.drafter.named_parameters()}
        outcome = stepper.take(stepper.prepare(planned), 1e-3)
        after = {name: whole(p.detach()) for name, p in passes.drafter.named_parameters()}
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not optimizer.state
        good = stepper.take(stepper.prepare(PlannedStep(0, 1, (("t0", "t1", "t3"),))), 1e-3)
        return sorted(outcome.culprits), good.moved

    assert in_ranks(2, work) == [(["t2", "t5"], True)] * 2


def test_one_process_that_is_stopped_stops_all(tmp_path):
    def work(world):
        made, _ = trainer(tmp_path, WIDE, world=world, after=2 if world.rank == 1 else None)
        with pytest.raises(Stopped) as caught:
            made.run()
        return caught.value.signal_number

    assert in_ranks(2, work) == [15, 15]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]


def test_a_process_that_dies_ends_the_others_soon_with_the_state_saved(tmp_path):
    """Rank 1 is killed after its third step; rank 0 has taken three or four whole steps and keeps them."""

    def work(world):
        made, progress = trainer(tmp_path / "killed", WIDE, world=world)
        if world.rank == 1:
            count = progress.advance

            def advance(units, **facts):
                count(units, **facts)
                if progress.steps == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            progress.advance = advance
        began = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            made.run()
        return time.monotonic() - began, str(caught.value)

    seconds, text = in_ranks(2, work, allow_death=True)[0]
    assert seconds < 30  # it was told, and did not wait for the 40 s after which gloo gives up
    assert "gone" in text
    assert "eyas run" in text
    names = [path.name for path in list_checkpoints(tmp_path / "killed" / "checkpoints")]
    assert names == ["step-00000003"]

    def finish(world):
        trainer(tmp_path / "killed", WIDE, world=world)[0].run()

    def unbroken(world):
        trainer(tmp_path / "unbroken", WIDE, world=world)[0].run()

    in_ranks(2, finish)
    in_ranks(2, unbroken)
    last = [list_checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("killed", "unbroken")]
    assert_same(*last)


def test_two_one_and_four_processes_see_every_sample_once_an_epoch(tmp_path):
    """A run stopped under two, gone on alone, stopped again and finished under four."""
    options = dataclasses.replace(WIDE, epochs=3, batch_tokens=25, accumulate=2)
    log = tmp_path / "seen.jsonl"

    def part(after):
        def work(world):
            made, _ = trainer(tmp_path, options, world=world, after=after if world.first else None)
            take = Stepper.take

            def watched(self, ready, rate):
                outcome = take(self, ready, rate)
                line = {"size": world.size, "epoch": ready.planned.epoch, "samples": ready.samples}
                with open(log, "a") as file:
                    file.write(json.dumps(line) + "\n")
                return outcome

            Stepper.take = watched
            if after is None:
                return made.run().state
            with pytest.raises(Stopped):
                made.run()
            return None

        return work

    in_ranks(2, part(4))
    in_ranks(1, part(5))
    states = in_ranks(4, part(None))
    total = len(TrainingPlan(train_source().lengths(), epochs=3, batch_tokens=25, accumulate=2, seed=0).steps)
    assert states[0].step == total == 12
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["size"] for line in lines} == {1, 2, 4}
    for epoch in range(3):
        seen = [name for line in lines if line["epoch"] == epoch for name in line["samples"]]
        assert sorted(seen) == sorted(train_source().samples)
    # the losses agree with those of one process throughout
    trainer(tmp_path / "alone", options)[0].run()
    ours, theirs = rows_of(tmp_path, "train"), rows_of(tmp_path / "alone", "train")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, total + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)


def test_words_between_processes():
    def work(world):
        rank = world.rank
        return (
            world.total([rank + 0.5, 1e-300, float("inf") if rank == 2 else 0.0]),
            world.highest([rank, -rank]),
            world.from_first({"is": [rank, "ä", None]} if rank == 0 else None),
            world.from_all(["x"] * rank),
        )

    assert (
        in_ranks(3, work)
        == [([4.5, 3e-300, float("inf")], [2, 0], {"is": [0, "ä", None]}, [[], ["x"], ["x", "x"]])] * 3
    )


def test_weights_are_a_drafters_own():
    """Wrapping leaves the names of parameters as they are, and a process alone is not wrapped."""
    passes = make_passes()
    names = [name for name, _ in passes.drafter.named_parameters()]
    Parallel(passes, in_ranks(1, lambda world: world)[0], "fsdp")
    assert [name for name, _ in passes.drafter.named_parameters()] == names
    assert isinstance(passes.drafter, EagleDrafter)
