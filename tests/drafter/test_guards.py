"""Faults planted in training data, and what a run says of them."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch

from eyas.base.errors import TrainingDiverged
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.drafter.checkpoint import TrainingState, read_checkpoint
from eyas.drafter.gradients import measure_and_clip
from eyas.drafter.guards import Guards
from eyas.drafter.parallel import Parallel
from eyas.drafter.passes import BatchPasses
from eyas.drafter.schedule import PlannedStep, epoch_order
from eyas.drafter.settings import TrainSettings
from eyas.drafter.stepping import Stepper, make_optimizer
from eyas.drafter.teacher import Teacher
from eyas.drafter.world import World
from tests.drafter.cases import MemorySource, make_drafter, make_head, make_sample, make_vocabulary
from tests.drafter.test_trainer import SETTINGS, one_thread, rows_of, train_source, trainer

HEAD = dataclasses.replace(SETTINGS, warm_start="head", epochs=2)
_ = one_thread


def make_stepper(source, settings=HEAD):
    drafter = make_drafter(dtype=settings.master_dtype())
    teacher = Teacher(
        make_head(), make_vocabulary(), device=torch.device("cpu"), dtype=settings.compute_dtype()
    )
    optimizer = make_optimizer(drafter, settings)
    passes = BatchPasses(drafter, teacher, settings)
    parallel = Parallel(passes, World(), "ddp")
    return (
        drafter,
        optimizer,
        Stepper(parallel, optimizer, source, source.lengths(), source.lengths(), settings, StopFlag()),
    )


def everything(drafter, optimizer):
    return copy.deepcopy((drafter.state_dict(), optimizer.state_dict()["state"]))


def same(one, other):
    (weights, states), (weights2, states2) = one, other
    assert weights.keys() == weights2.keys()
    assert states.keys() == states2.keys()
    return all(torch.equal(weights[k], weights2[k]) for k in weights) and all(
        torch.equal(states[i][k], states2[i][k]) for i in states for k in states[i]
    )


def plant(sample, fault):
    """One number of a sample becomes a fault."""
    if fault == "nan in aux":
        sample.aux[1, 0, 0] = float("nan")
    elif fault == "infinity in aux":
        sample.aux[1, 0, 0] = float("inf")
    elif fault == "nan in last":
        sample.last[len(sample.last) // 2, 3] = float("nan")
    else:
        sample.last[len(sample.last) // 2, 3] = float("inf")


FAULTS = ["nan in aux", "infinity in aux", "nan in last", "infinity in last"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_moves_nothing_and_is_named(fault):
    source = train_source()
    plant(source.samples["t3"], fault)
    drafter, optimizer, stepper = make_stepper(source)
    good = stepper.prepare(PlannedStep(0, 0, (("t0", "t1"),)))
    assert stepper.take(good, 1e-3).moved
    before = everything(drafter, optimizer)
    bad = stepper.prepare(PlannedStep(0, 1, (("t4", "t7"), ("t8", "t3", "t5"))))
    outcome = stepper.take(bad, 1e-3)
    assert not outcome.moved
    assert outcome.culprits == ("t3",)
    assert "loss" in outcome.reason
    assert same(everything(drafter, optimizer), before)
    assert all(p.grad is None for p in drafter.parameters())
    assert stepper.take(good, 1e-3).moved
    after = everything(drafter, optimizer)
    assert not same(after, before)
    # as if the bad step had never been
    drafter, optimizer, stepper = make_stepper(train_source())
    for _ in range(2):
        stepper.take(good, 1e-3)
    assert same(everything(drafter, optimizer), after)


def test_a_gradient_alone_is_enough():
    drafter, optimizer, stepper = make_stepper(train_source())
    ready = stepper.prepare(PlannedStep(0, 0, (("t4", "t7"), ("t8", "t3"))))
    seen = []

    def overflow(gradient):  # in the second batch, and when its sample t3 is looked at alone
        seen.append(gradient)
        return gradient * (float("inf") if len(seen) in (2, 6) else 1.0)

    drafter.midlayer.mlp.down_proj.weight.register_hook(overflow)
    before = everything(drafter, optimizer)
    outcome = stepper.take(ready, 1e-3)
    assert outcome.reason == "the gradient of midlayer.mlp is not finite"
    assert np.isfinite(outcome.loss)
    assert outcome.culprits == ("t3",)
    assert same(everything(drafter, optimizer), before)


def test_faults_that_only_show_together_blame_all():
    source = train_source()
    _, _, stepper = make_stepper(source)
    ready = stepper.prepare(PlannedStep(0, 0, (("t0", "t1"),)))
    ready.batches[0].aux[0, 0, 0] = float("nan")  # of the batch, not of a sample
    assert stepper.take(ready, 1e-3).culprits == ("t0", "t1")


def test_planted_faults_are_counted(tmp_path):
    """Each sample comes once an epoch: a planted fault costs its own step each time, and no other."""
    source, settings = train_source(), dataclasses.replace(HEAD, epochs=3, batch_tokens=1)  # a sample a step
    planted = dict(zip(random.Random(3).sample(sorted(source.samples), 4), FAULTS, strict=False))
    for name, fault in planted.items():
        plant(source.samples[name], fault)
    made, progress = trainer(tmp_path, settings, samples=source)
    result = made.run()
    skipped = rows_of(tmp_path, "skipped")
    assert sorted(row["samples"] for row in skipped) == sorted([[name] for name in planted] * 3)
    assert result.state.counters["bad_steps"] == 12
    assert sum("skipped" in said for said in progress.said) == 12
    assert len(rows_of(tmp_path, "train")) == 30 - 12
    assert read_checkpoint(result.last).state.counters == result.state.counters
    assert all(torch.isfinite(tensor).all() for tensor in read_checkpoint(result.last).model.values())


def test_the_last_allowed_fault_in_a_row_ends_the_run(tmp_path):
    source = train_source()
    for name in source.samples:
        plant(source.samples[name], "nan in last")
    settings = dataclasses.replace(HEAD, batch_tokens=1, max_bad_steps=4)
    made, _ = trainer(tmp_path, settings, samples=source)
    with pytest.raises(TrainingDiverged) as caught:
        made.run()
    assert "4 training steps in a row" in caught.value.what
    assert "the loss is nan" in caught.value.why
    assert "train.lr" in caught.value.hint
    assert len(rows_of(tmp_path, "skipped")) == 4


def watched(losses, ratio=2.0):
    """What guards record of a series of losses."""
    state = TrainingState(0, 0, 0, 0, 0, 0, {}, {}, "", {})
    rows = []
    guards = Guards(
        TrainSettings(spike_ratio=ratio),
        state,
        lambda kind, **facts: rows.append((kind, state.step, facts)),
        SilentProgress(),
    )
    for loss in losses:
        state.step += 1
        guards.good(loss, ["a", "b"])
    return rows, state


def test_jumps_against_the_running_median():
    rng = np.random.default_rng(4)
    losses = (5 * np.exp(-np.arange(300) / 80) + 1 + 0.2 * rng.random(300)).tolist()
    planted = {3: 40.0, 20: 13.0, 21: 14.0, 150: 9.0, 299: 5.5}
    for place, loss in planted.items():
        losses[place] = loss
    rows, state = watched(losses)
    expected = []
    for i in range(16, 300):
        before = np.median(losses[max(0, i - 64) : i])
        if losses[i] > 2 * before:
            expected.append((i + 1, losses[i], float(before)))
    assert {step - 1 for step, _, _ in expected} == set(planted) - {3}
    assert [(step, facts["loss"], facts["median"]) for _, step, facts in rows] == expected
    assert all(kind == "spike" and facts["samples"] == ["a", "b"] for kind, _, facts in rows)
    assert state.counters == {"spikes": 4}
    assert state.recent_losses == losses[-64:]
    assert watched(losses, ratio=50.0)[0] == []


def test_noise_of_small_batches_is_no_jump():
    rng = np.random.default_rng(7)
    losses = np.exp(0.4 * rng.standard_normal(2000)).tolist()  # one in 24 is above twice the median
    losses[1000] = 12.0
    rows, _state = watched(losses)
    expected = []
    for i in range(16, 2000):
        before = np.asarray(losses[max(0, i - 64) : i])
        median = np.median(before)
        if losses[i] > 2 * median and losses[i] > median + 8 * np.median(np.abs(before - median)):
            expected.append(i + 1)
    assert [step for _, step, _ in rows] == expected
    assert 1001 in expected
    above = sum(losses[i] > 2 * np.median(losses[max(0, i - 64) : i]) for i in range(16, 2000))
    assert above > 50
    assert len(expected) < 10


def test_a_jump_is_named_and_its_step_counts(tmp_path):
    source = MemorySource([make_sample(f"a{i}", 12, [(1, 12)], i)[0] for i in range(40)])
    late = epoch_order(sorted(source.samples), SETTINGS.seed, 0)[30]
    for name, sample in source.samples.items():  # one teacher is certain of what nobody can guess
        sample.last.mul_(30.0 if name == late else 0.01)
    settings = dataclasses.replace(HEAD, epochs=1, batch_tokens=1, loss="kl", spike_ratio=3.0)
    made, progress = trainer(tmp_path, settings, samples=source, validation=False)
    result = made.run()
    steps = rows_of(tmp_path, "train")
    losses = [row["loss"] for row in steps]
    jumps = [i for i in range(16, 40) if losses[i] > 3 * np.median(losses[max(0, i - 64) : i])]
    spikes = rows_of(tmp_path, "spike")
    assert [row["step"] for row in spikes] == [steps[i]["step"] for i in jumps]
    assert [row["samples"] for row in spikes] == [[late]]
    assert result.state.counters == {"spikes": 1}
    assert any(late in said and "jumped" in said for said in progress.said)
    assert len(steps) == 40


def test_a_batch_without_supervision_is_named_once(tmp_path):
    source = train_source()
    source.samples["empty"] = make_sample("empty", 29, [(3, 4)], 77)[0]
    made, progress = trainer(tmp_path, dataclasses.replace(SETTINGS, accumulate=3, epochs=4), samples=source)
    result = made.run()
    rows = rows_of(tmp_path, "unsupervised")
    assert [row["samples"] for row in rows] == [["empty"]] * 4
    assert result.state.counters == {"unsupervised_batches": 4}
    assert sum("empty" in said for said in progress.said) == 1


@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_norms_by_module(limit):
    drafter = make_drafter("eagle3.1")
    rng = np.random.default_rng(1)
    for parameter in drafter.parameters():
        parameter.grad = torch.from_numpy(rng.normal(size=tuple(parameter.shape)))
    before = {name: p.grad.numpy().copy() for name, p in drafter.named_parameters()}
    norms = measure_and_clip(drafter.named_parameters(), limit)
    squares = {name: float((grad**2).sum()) for name, grad in before.items()}
    modules = {
        "fc": ["fc.weight"],
        "fc_norm": [f"fc_norm.{i}.weight" for i in range(3)],
        "midlayer.self_attn": [f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"],
        "midlayer.mlp": [f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")],
        **{
            f"midlayer.{x}": [f"midlayer.{x}.weight"]
            for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm": ["norm.weight"],
        "lm_head": ["lm_head.weight"],
    }
    assert sorted(name for names in modules.values() for name in names) == sorted(squares)
    expected = {module: sum(squares[name] for name in names) ** 0.5 for module, names in modules.items()}
    assert norms.by_module == pytest.approx(expected, rel=1e-12)
    assert norms.total == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-12)
    scale = min(1.0, limit / norms.total)
    for name, parameter in drafter.named_parameters():
        np.testing.assert_allclose(parameter.grad.numpy(), before[name] * scale, rtol=1e-5)


def test_the_metrics_hold_norms_by_module(tmp_path):
    made, _ = trainer(tmp_path, dataclasses.replace(SETTINGS, epochs=1), validation=False)
    made.run()
    for row in rows_of(tmp_path, "train"):
        assert sum(norm**2 for norm in row["grad_norms"].values()) ** 0.5 == pytest.approx(row["grad_norm"])
        assert set(row["grad_norms"]) >= {"fc", "midlayer.mlp", "midlayer.self_attn", "lm_head", "norm"}
