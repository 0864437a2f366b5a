"""A store with a bound, through the whole pipeline: what is captured and trained, and when."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.pipeline.waves import can_work_together
from eyas.stages.extract import work
from eyas.targets.local.model import LocalTarget
from tests.cli.command import eyas
from tests.faults.acknowledged import acknowledging
from tests.faults.forked import error_of, run_child
from tests.projects import outcome
from tests.waves import (
    BOUND,
    change,
    ids_of,
    messages,
    noting_batches,
    run_into_the_waves,
    states_of,
    store_bytes,
    trained_counts,
    waves_of,
)


def test_no_batch_holds_samples_of_two_waves_and_each_is_trained_twice(trained: Path) -> None:
    batches = [line.split() for line in (trained.parent / "batches").read_text().splitlines()]
    counts = Counter(name for batch in batches for name in batch)
    assert set(counts) == ids_of(trained, "train")
    assert set(counts.values()) == {2}
    # a wave is trained for all epochs before another one begins: what is seen again is never far
    first, last = {}, {}
    for place, batch in enumerate(batches):
        for name in batch:
            first.setdefault(name, place)
            last[name] = place
    groups: list[set[str]] = []
    for place, batch in enumerate(batches):
        open_ = {name for name in first if first[name] <= place <= last[name]}
        if groups and groups[-1] & (open_ | set(batch)):
            groups[-1] |= open_ | set(batch)
        else:
            groups.append(open_ | set(batch))
    assert len(groups) == waves_of(trained)["waves"] >= 3


def test_each_epoch_is_captured_anew_when_asked_for(project: Path, tmp_path: Path) -> None:
    change(project, "[store]", "[store]\nrecapture = true")
    change(project, "epochs = 2", "epochs = 2.5")
    captured = tmp_path / "captured"

    def noting() -> None:
        noting_batches(tmp_path / "batches")()
        acknowledging(captured)()

    assert run_child(project, prepare=noting) == 0, error_of(project)
    train, kept = ids_of(project, "train"), ids_of(project, "validation")
    counts, captures = trained_counts(tmp_path / "batches"), trained_counts(captured)
    assert set(counts) == train
    assert set(counts.values()) == {2, 3}, "all of two epochs, some of the third"
    assert captures == counts | Counter(kept)
    assert sum(captures.values()) == waves_of(project)["captures"]
    assert states_of(project) == {"stored": len(kept), "released": len(train)}
    assert store_bytes(project) <= BOUND
    # killed in the middle, it comes to the same
    again = project.with_name("again")
    shutil.copytree(project, again, symlinks=True)
    for name in ("store", "drafter", "reports", "exports", "logs"):
        shutil.rmtree(again / name)
    for path in (again / "state").glob("ledger.db*"):
        path.unlink()
    kills, seconds = 0, 1.0
    while run_child(again, kill_after_seconds=seconds) != 0:
        kills, seconds = kills + 1, seconds * 1.4
    assert kills >= 2
    assert outcome(again) == outcome(project)


def test_a_sample_that_cannot_be_captured_is_set_aside_and_training_goes_on(
    project: Path, tmp_path: Path
) -> None:
    poisoned = sorted(ids_of(project, "train"))[3]

    def plant() -> None:
        noting_batches(tmp_path / "batches")()
        real = work._Capture._checked

        def checked(self: Any, item: Any, states: Any) -> Any:
            if item.id == poisoned:
                states.aux[0, 0, 0] = float("nan")
            return real(self, item, states)

        work._Capture._checked = checked  # type: ignore[method-assign]

    change(project, "[extract]", "[extract]\nretry_seconds = 0.01")
    assert run_child(project, prepare=plant) == 0, error_of(project)
    counts = trained_counts(tmp_path / "batches")
    assert set(counts) == ids_of(project, "train") - {poisoned}
    assert set(counts.values()) == {2}
    states = states_of(project)
    assert states["set_aside"] == 1
    assert sum(states.values()) == len(ids_of(project, "train") | ids_of(project, "validation"))
    assert list(waves_of(project)["passed"]) == [poisoned]
    status = eyas("status", "--project", project, "--json").json
    assert status["set_aside_samples"] == 1
    assert [failure["id"] for failure in status["failures"]] == [poisoned]
    again = eyas("run", "--project", project, "--retry-failed")
    assert again.code == 3, again.err
    assert states_of(project) == states, "training has gone past it"
    for path in (project / "state").glob("ledger.db*"):
        path.unlink()
    assert eyas("run", "--project", project).code == 3
    assert states_of(project) == states


def test_an_older_checkpoint_needs_an_older_wave_again(project: Path, trained: Path) -> None:
    """Content of the newest changed in the middle: set aside, and the end is the same."""
    change(project, "keep_checkpoints = ", "keep_checkpoints = ") if "keep_checkpoints" in (
        project / "eyas.toml"
    ).read_text() else change(project, "[train]", "[train]\nkeep_checkpoints = 1")
    folder = project / "drafter" / "checkpoints"

    def over() -> int:
        found = sorted(folder.glob("step-*"))
        return int(json.loads((found[-1] / "seal.json").read_text())["about"]["waves_over"]) if found else 0

    assert run_into_the_waves(project, lambda: over() >= 2) != 0
    found = sorted(folder.glob("step-*"))
    for path in found:
        content = bytearray((path / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (path / "model.safetensors").write_bytes(content)
    assert run_child(project) == 0, error_of(project)
    assert "needed again and will be captured again" in messages(project)
    assert outcome(project) == outcome(trained)


def test_a_damaged_segment_of_a_wave_is_captured_again(project: Path, trained: Path) -> None:
    assert eyas("extract", "--project", project).code == 0
    for path in sorted((project / "store" / "segments").iterdir()):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert run_child(project) == 0, error_of(project)
    assert outcome(project) == outcome(trained)


def test_extract_alone_fills_the_store_and_train_alone_takes_what_is_there(
    project: Path, trained: Path
) -> None:
    done = eyas("extract", "--project", project)
    assert done.code == 0, done.err
    assert "filled to its bound" in done.err
    assert "eyas run" in done.err
    states = states_of(project)
    assert states["pending"] > 0
    assert "released" not in states
    assert store_bytes(project) <= BOUND
    assert eyas("extract", "--project", project).code == 0
    assert states_of(project) == states, "there is no room for more"
    done = eyas("train", "--project", project)
    assert done.code == 0, done.err
    assert "is not captured yet: eyas run" in done.err
    after = states_of(project)
    assert after["released"] > 0
    assert after["pending"] == states["pending"]
    over = eyas("status", "--project", project, "--json").json["waves"]
    assert over["waves_over"] == 2
    refused = eyas("train", "--project", project)
    assert refused.code == 2
    assert "to be captured first for wave 3" in refused.err
    assert "eyas run" in refused.err
    for _ in range(20):
        if states_of(project).get("pending", 0) == 0:
            break
        assert eyas("extract", "--project", project).code == 0
        assert eyas("train", "--project", project).code == 0
    assert eyas("run", "--project", project).code == 0
    assert outcome(project) == outcome(trained)


def test_two_processes_train_in_waves(project: Path, tmp_path: Path) -> None:
    more = ("train.processes=2", "train.accumulate=2", "train.dtype=float64", "store.max_bytes=720kB")
    assert run_child(project, overrides=more) == 0, error_of(project)
    alone = project.with_name("alone")
    shutil.copytree(project, alone, symlinks=True)
    for name in ("store", "drafter", "reports", "exports", "logs"):
        shutil.rmtree(alone / name)
    for path in (alone / "state").glob("ledger.db*"):
        path.unlink()
    assert run_child(alone, overrides=more[1:]) == 0, error_of(alone)
    import torch
    from safetensors.torch import load_file

    two, one = (
        load_file(str(sorted((root / "drafter" / "checkpoints").glob("step-*"))[-1] / "model.safetensors"))
        for root in (project, alone)
    )
    for name in two:
        torch.testing.assert_close(two[name], one[name], rtol=1e-9, atol=1e-10)
    kept, train = ids_of(project, "validation"), ids_of(project, "train")
    assert states_of(project) == {"stored": len(kept), "released": len(train)}


def test_a_released_file_is_not_held_by_a_map(project: Path) -> None:
    """A removed file keeps its room on the disk for as long as somebody maps it."""
    held = project.with_name("held")

    def plant() -> None:
        from eyas.pipeline import waves

        real = waves.settle

        def settle(*arguments: Any) -> Any:
            done = real(*arguments)
            maps = Path("/proc/self/maps").read_text().splitlines()
            left = [line for line in maps if "seg-" in line and line.endswith("(deleted)")]
            with open(held, "a") as file:
                file.write(f"{done.segments} {len(left)}\n")
            return done

        waves.settle = settle

    assert run_child(project, prepare=plant) == 0, error_of(project)
    seen = [tuple(map(int, line.split())) for line in held.read_text().splitlines()]
    assert sum(segments for segments, _ in seen) >= 3
    assert all(left == 0 for _, left in seen), seen


def test_a_bound_that_holds_everything_keeps_everything(project: Path) -> None:
    change(project, f'max_bytes = "{BOUND}"', 'max_bytes = "50MB"')
    assert run_child(project) == 0, error_of(project)
    assert waves_of(project)["waves"] == 1
    assert states_of(project) == {"stored": len(ids_of(project, "train") | ids_of(project, "validation"))}
    steps = eyas("run", "--dry-run", "--project", project, "--json").json["plan"]
    assert [step["action"] for step in steps] == ["skip"] * 6


class Gpus:
    def __init__(self, count: int) -> None:
        self.count = count

    def read(self) -> list[Any]:
        return [object()] * self.count


@pytest.mark.parametrize(
    ("kind", "device", "urls", "count", "together"),
    [
        ("local", "cpu", "", 0, False),
        ("vllm", "auto", "", 8, False),
        ("vllm", "cuda", "", 8, False),
        ("sglang", "auto", "", 0, True),
        ("sglang", "cpu", "", 8, True),
        ("vllm", "cuda:7", "", 8, True),
        ("vllm", "auto", "http://127.0.0.1:1", 8, True),
    ],
)
def test_both_work_together_only_where_neither_takes_the_other_s_place(
    kind: str, device: str, urls: str, count: int, together: bool, project: Path
) -> None:
    words = [f"target.kind={kind}", f"target.device={device}", *([f'serve.urls=["{urls}"]'] if urls else [])]
    assert can_work_together(load_config(project, words), Gpus(count)) is together


def test_without_a_bound_nothing_knows_of_waves(project: Path) -> None:
    for value in (None, "0"):
        root = project.with_name(f"p{value}")
        shutil.copytree(project, root, symlinks=True)
        change(root, f'max_bytes = "{BOUND}"', "" if value is None else f'max_bytes = "{value}"')
        assert run_child(root) == 0, error_of(root)
        assert set(states_of(root)) == {"stored"}
        assert not (root / "store" / "waves.json").exists()
        folder = sorted((root / "drafter" / "checkpoints").glob("step-*"))[-1]
        state = json.loads((folder / "state.json").read_text())
        assert state["format"] == 2
        assert "waves_over" not in state
        assert "waves" not in json.dumps(state["recipe"])
        assert eyas("status", "--project", root, "--json").json["waves"] is None


def test_the_target_is_loaded_once_for_the_waves_that_fit(project: Path) -> None:
    loads = project.with_name("loads")

    def plant() -> None:
        real = LocalTarget.load.__func__  # type: ignore[attr-defined]

        def load(cls: Any, *arguments: Any, **options: Any) -> Any:
            with open(loads, "a") as file:
                file.write("x")
            return real(cls, *arguments, **options)

        LocalTarget.load = classmethod(load)  # type: ignore[method-assign,assignment]

    assert run_child(project, prepare=plant, overrides=("evaluate.limit=1",)) == 0, error_of(project)
    num_waves = waves_of(project)["waves"]
    assert os.path.getsize(loads) <= -(-num_waves // 2) + 1, "once for every two waves, and to evaluate"
