from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from eyas.base.errors import DataError, RecipeChanged, Stopped, TrainingDiverged
from eyas.base.files import set_aside
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.drafter.checkpoint import list_checkpoints, read_checkpoint
from eyas.drafter.settings import TrainSettings
from eyas.drafter.teacher import Teacher
from eyas.drafter.trainer import Trainer, TrainingPlace, make_optimizer
from eyas.drafter.warmstart import give_first_weights
from tests.drafter.cases import MemorySource, make_drafter, make_head, make_sample, make_vocabulary

SETTINGS = TrainSettings(
    epochs=2.5, batch_tokens=30, steps=3, lr=3e-3, weight_decay=0.1, checkpoint_minutes=1e9, validations=2
)


def train_source():
    lengths = [9, 14, 30, 8, 17, 12, 41, 10, 6, 22]
    samples = [make_sample(f"t{i}", n, [(2, n - 1)], i)[0] for i, n in enumerate(lengths)]
    for sample in samples:  # aux states of unequal sizes, as real ones are
        sample.aux.mul_(torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64)[:, None])
    return MemorySource(samples)


def validation_source():
    return MemorySource([make_sample(f"v{i}", 15, [(4, 15)], 90 + i)[0] for i in range(3)])


class Interrupting(SilentProgress):
    """Asks for a stop, or dies, after a number of steps; keeps what was said."""

    def __init__(self, flag=None, after=None, error=None):
        self.flag, self.after, self.error = flag, after, error
        self.said, self.steps, self.done = [], 0, 0

    def start(self, label, *, total, unit, done=0):
        self.total, self.done = total, done

    def advance(self, units, **facts):
        self.steps += 1
        self.done += units
        if self.steps == self.after:
            if self.error:
                raise self.error
            self.flag.request(15)

    def say(self, message):
        self.said.append(message)


def trainer(
    folder, settings=SETTINGS, *, after=None, error=None, samples=None, validation=True, weights_seed=0
):
    """A trainer as a fresh process makes it; ``weights_seed`` is what memory held before."""
    flag = StopFlag()
    samples = samples or train_source()
    drafter = make_drafter(dtype=settings.master_dtype())
    drafter.initialise(1000 + weights_seed)
    vocabulary = make_vocabulary()
    teacher = Teacher(make_head(), vocabulary, device=torch.device("cpu"), dtype=settings.compute_dtype())

    def start():
        norm = torch.ones(12)
        give_first_weights(drafter, settings, vocabulary, head=make_head(), norm_weight=norm, samples=samples)

    progress = Interrupting(flag, after, error)
    place = TrainingPlace(
        folder / "checkpoints",
        folder / "metrics.jsonl",
        lambda path, reason: set_aside(path, folder / "set-aside", reason),
    )
    made = Trainer(
        drafter,
        teacher,
        samples,
        validation_source() if validation else None,
        settings,
        place,
        recipe={"store": "abc"},
        start=start,
        progress=progress,
        stop=flag,
    )
    return made, progress


def rows_of(folder, kind):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def assert_same(one, other):
    """Two checkpoints hold the same bits."""
    a, b = read_checkpoint(one), read_checkpoint(other)
    for left, right in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), name
    assert dataclasses.asdict(a.state) == dataclasses.asdict(b.state)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    made, progress = trainer(folder)
    return folder, made.run(), progress


def test_a_run_learns(tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=12, lr=1e-2)
    result = trainer(tmp_path, settings, validation=False)[0].run()
    losses = [row["loss"] for row in rows_of(tmp_path, "train")]
    per_epoch = result.state.total_steps // 12
    assert sum(losses[-per_epoch:]) < 0.6 * sum(losses[:per_epoch])


def test_a_run_says_what_it_did(unbroken):
    folder, result, progress = unbroken
    steps = rows_of(folder, "train")
    assert [row["step"] for row in steps] == list(range(1, result.state.total_steps + 1))
    assert steps[-1]["tokens"] == progress.total == progress.done
    assert len(steps[0]["step_loss"]) == 3
    weighted = sum(0.8**j * x for j, x in enumerate(steps[0]["step_loss"]))
    assert steps[0]["loss"] == pytest.approx(weighted, rel=1e-5)
    measured = rows_of(folder, "validation")
    assert len(measured) == 2
    assert measured[-1]["step"] == result.state.total_steps
    assert result.state.validation["walk_tau"] == measured[-1]["walk_tau"]
    assert {path.name for path in result.last.iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "state.json", "seal.json",
    }  # fmt: skip
    saved = read_checkpoint(result.last)
    assert all(t.dtype == torch.float32 for t in saved.model.values())
    assert saved.state.shape == make_drafter().shape.as_dict()


@pytest.mark.parametrize("kind", ["stop", "kill"])
def test_interrupted_anywhere_ends_in_the_same_bits(unbroken, tmp_path, kind):
    _, whole, _ = unbroken
    total = whole.state.total_steps
    assert total > 12
    settings = SETTINGS if kind == "stop" else dataclasses.replace(SETTINGS, checkpoint_minutes=1e-9)
    for number, after in enumerate([1, 2, 5, 3]):
        error = RuntimeError("killed") if kind == "kill" else None
        made, progress = trainer(tmp_path, settings, after=after, error=error, weights_seed=number + 1)
        with pytest.raises((Stopped, RuntimeError)):
            made.run()
        assert (number > 0) == any("resuming" in said for said in progress.said)
    made, progress = trainer(tmp_path, settings, weights_seed=99)
    result = made.run()
    assert progress.done == progress.total
    assert result.state.step == total
    assert_same(result.last, whole.last)
    again, _ = trainer(tmp_path, settings, weights_seed=98)
    assert again.run().last == result.last


def test_a_stop_saves_and_names_its_signal(tmp_path):
    made, _ = trainer(tmp_path, after=2)
    with pytest.raises(Stopped) as caught:
        made.run()
    assert caught.value.exit_code == 143
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "seal"])
def test_a_damaged_newest_checkpoint_is_set_aside(unbroken, tmp_path, damage):
    settings = dataclasses.replace(SETTINGS, checkpoint_minutes=1e-9)
    made, _ = trainer(tmp_path, settings, after=5)
    with pytest.raises(Stopped):
        made.run()
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    file = newest / ("optimizer.safetensors" if damage != "remove" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-7])
    elif damage == "remove":
        file.unlink()
    else:
        (newest / "seal.json").write_text("{")
    made, progress = trainer(tmp_path, settings, weights_seed=5)
    result = made.run()
    assert any(newest.name in said and "damaged" in said for said in progress.said)
    assert any("resuming at step 4" in said for said in progress.said)
    assert any(newest.name in path.name for path in (tmp_path / "set-aside").iterdir())
    assert_same(result.last, unbroken[1].last)


def test_the_newest_and_the_best_are_kept(tmp_path):
    settings = dataclasses.replace(SETTINGS, checkpoint_minutes=1e-9, keep_checkpoints=2, validations=6)
    made, _ = trainer(tmp_path, settings)
    result = made.run()
    total = result.state.total_steps
    best = max(rows_of(tmp_path, "validation"), key=lambda row: (row["walk_tau"], -row["step"]))["step"]
    assert result.state.best["step"] == best
    names = {path.name for path in list_checkpoints(tmp_path / "checkpoints")}
    assert names == {f"step-{step:08d}" for step in {total, total - 1, best}}
    assert result.best.name == f"step-{best:08d}"
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]


def test_another_recipe_is_refused(tmp_path):
    made, _ = trainer(tmp_path, after=1)
    with pytest.raises(Stopped):
        made.run()
    with pytest.raises(RecipeChanged) as caught:
        trainer(tmp_path, dataclasses.replace(SETTINGS, lr=1e-4))[0].run()
    assert "train.lr: 0.003 -> 0.0001" in str(caught.value)
    kept = trainer(tmp_path, dataclasses.replace(SETTINGS, checkpoint_minutes=3.0, keep_checkpoints=5))[0]
    assert kept.run().state.step == kept.run().state.total_steps


def poisoned(names):
    source = train_source()
    for name in names:
        source.samples[name].aux[0, 0, 0] = float("nan")
    return source


def test_a_step_that_is_not_finite_is_skipped_by_name(tmp_path):
    made, progress = trainer(
        tmp_path, dataclasses.replace(SETTINGS, warm_start="head"), samples=poisoned(["t2"])
    )
    result = made.run()
    skipped = rows_of(tmp_path, "skipped")
    assert len(skipped) in (2, 3)  # once per epoch, and perhaps in the half one
    assert all("t2" in row["samples"] for row in skipped)
    assert any("t2" in said for said in progress.said)
    assert result.state.counters["bad_steps"] == len(skipped)
    assert result.state.bad_steps == 0
    model = read_checkpoint(result.last).model
    assert all(torch.isfinite(tensor).all() for tensor in model.values())


def test_too_many_bad_steps_end_the_run(tmp_path):
    settings = dataclasses.replace(SETTINGS, max_bad_steps=3, warm_start="head")
    made, _ = trainer(tmp_path, settings, samples=poisoned([f"t{i}" for i in range(10)]))
    with pytest.raises(TrainingDiverged, match="3 training steps"):
        made.run()
    assert len(rows_of(tmp_path, "skipped")) == 3


def test_accumulation_equals_one_large_batch(tmp_path):
    results = []
    for budget, accumulate in [(40, 1), (20, 2), (10, 4)]:
        source = MemorySource([make_sample(f"a{i}", 10, [(1 + i % 4, 10)], i)[0] for i in range(12)])
        settings = dataclasses.replace(
            SETTINGS, epochs=2, batch_tokens=budget, accumulate=accumulate, dtype="float64"
        )
        made, _ = trainer(tmp_path / str(budget), settings, samples=source, validation=False)
        result = made.run()
        assert result.state.total_steps == 6
        assert result.best is None
        results.append(read_checkpoint(result.last).model)
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-7, atol=1e-9)


def test_a_step_without_supervised_rows_changes_nothing(tmp_path):
    source = train_source()
    source.samples["empty"] = make_sample("empty", 29, [(3, 4)], 77)[0]
    made, _ = trainer(tmp_path, samples=source)
    result = made.run()
    skipped = rows_of(tmp_path, "skipped")
    assert {row["reason"] for row in skipped} == {"no supervised row"}
    assert all(row["samples"] == ["empty"] for row in skipped)
    assert result.state.counters == {"unsupervised_steps": len(skipped)}


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(DataError, match="no training samples"):
        trainer(tmp_path, samples=MemorySource([]))


def test_only_matrices_decay():
    drafter = make_drafter()
    optimizer = make_optimizer(drafter, SETTINGS)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for name, p in drafter.named_parameters() if "norm" not in name}


def test_settings_mirror_the_configuration():
    config = pytest.importorskip("eyas.config.schema").TrainConfig
    ours = {field.name for field in dataclasses.fields(TrainSettings)}
    # the drafter to go on from and the trackers are the stage's own business
    assert ours == set(config.model_fields) - {"start_from", "trackers"}
    values = config().model_dump(exclude={"start_from", "trackers"})
    defaults = dataclasses.asdict(TrainSettings())
    assert {k: v for k, v in values.items() if k != "dtype"} == {
        k: v for k, v in defaults.items() if k != "dtype"
    }
