"""Extract beyond the good path: continuity, poison samples, full disks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.base.layout import Layout
from eyas.stages.extract import work
from eyas.store.ledger import Ledger
from eyas.store.room import filesystem_kind
from eyas.targets.compare import relative_error
from eyas.targets.local.model import LocalTarget
from tests.cli.command import eyas
from tests.projects import make_project, store_content, tiny_target

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def extracted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_project(tmp_path_factory.mktemp("extracted") / "p", target)
    assert eyas("run", "--project", root, "--until", "extract").code == 0
    return root


@pytest.fixture
def half(extracted: Path, tmp_path: Path) -> Path:
    """A project whose extraction was interrupted: some samples are stored, some are pending."""
    root = Path(shutil.copytree(extracted, tmp_path / "p", symlinks=True))
    layout = Layout(root)
    with Ledger.open(layout.ledger) as ledger:
        for segment in ledger.segments()[1:]:
            ledger.release_segment(segment.name)
            (layout.segments / segment.name).unlink()
        counts = ledger.counts()
    if not counts["pending"].samples:
        with open(root / "prompts.jsonl", "a") as file:
            file.write('{"turns": ["one more about a heron"]}\n')
        assert eyas("run", "--project", root, "--until", "regenerate").code == 0
    return root


def move_target(root: Path, target: Path, place: Path) -> Path:
    """Give the project a copy of its target that a test may change."""
    moved = Path(shutil.copytree(target, place))
    text = (root / "eyas.toml").read_text()
    (root / "eyas.toml").write_text(text.replace(str(target), str(moved)))
    return moved


def test_a_resume_rechecks_stored_samples(half: Path) -> None:
    done = eyas("extract", "--project", half)
    assert done.code == 0, done.err
    assert "stored samples come out the same" in done.err


def test_an_edited_model_configuration_breaks_continuity(half: Path, target: Path, tmp_path: Path) -> None:
    moved = move_target(half, target, tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    config["rms_norm_eps"] = 5.0  # same weights, same layers, other arithmetic
    (moved / "config.json").write_text(json.dumps(config))
    before = store_content(half)
    done = eyas("extract", "--project", half)
    assert done.code == 2
    assert "differs by" in done.err
    assert "its weights or its arithmetic changed" in done.err
    assert store_content(half) == before


def test_shifted_layers_are_named(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalTarget.capture

    def shifted(self: LocalTarget, batch: Any, aux_layers: Any, **options: Any) -> Any:
        return real(self, batch, [max(0, k - 1) for k in aux_layers], **options)

    monkeypatch.setattr(LocalTarget, "capture", shifted)
    done = eyas("extract", "--project", half)
    assert done.code == 2
    assert "layers are shifted by +1" in done.err


def test_the_tolerance_separates_a_layer_from_its_neighbours(target: Path) -> None:
    model = LocalTarget.load(target)
    tokens = torch.randint(10, 300, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    layers = list(range(model.facts.num_layers + 1))
    states = model.capture([tokens], layers)[0].aux
    rounded = states.to(torch.bfloat16)
    for layer in layers:
        assert relative_error(states[:, layer], rounded[:, layer]) < 0.01
        for other in (layer - 1, layer + 1):
            if other in layers:
                assert relative_error(states[:, other], rounded[:, layer]) > 0.1


def test_other_weights_are_refused_by_their_fingerprint(half: Path, target: Path, tmp_path: Path) -> None:
    moved = move_target(half, target, tmp_path / "moved")
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    done = eyas("extract", "--project", half)
    assert done.code == 2
    assert "target_fingerprint" in done.err


def test_a_poison_sample_costs_its_retries_and_is_set_aside(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger.open_read_only(Layout(half).ledger) as ledger:
        total = sum(samples for samples, _ in ledger.counts().values())
    from eyas.store.samples import read_samples

    with Ledger.open_read_only(Layout(half).ledger) as ledger:
        stored = {name for name, _ in ledger.stored()}
    poison = next(s for s in read_samples(Layout(half).samples) if s.id not in stored)
    real, hits = LocalTarget.capture, [0]

    def poisoned(self: LocalTarget, batch: Any, aux_layers: Any, **options: Any) -> Any:
        states = real(self, batch, aux_layers, **options)
        for tokens, one in zip(batch, states, strict=True):
            if tokens == poison.tokens.tolist():
                hits[0] += 1
                one.aux[3, 1, 5] = float("nan")
        return states

    monkeypatch.setattr(LocalTarget, "capture", poisoned)
    done = eyas("extract", "--project", half, "--set", "extract.retry_seconds=0.1")
    assert done.code == 3, done.err
    assert hits[0] == 3
    assert done.err.count("trying again in") == 2
    assert "trying again in 0.1 s" in done.err
    assert "trying again in 0.2 s" in done.err
    view = eyas("status", "--project", half, "--json").json
    assert view["set_aside_samples"] == 1
    assert view["next_command"] == f"eyas run --project {half}", "training may go on without it"
    assert "retry-failed" in done.err
    assert [row["id"] for row in view["failures"]] == [poison.id]
    screen = eyas("status", "--project", half).out
    assert poison.id in screen
    assert "not finite" in screen or "finite" in screen
    with Ledger.open_read_only(Layout(half).ledger) as ledger:
        counts = ledger.counts()
        assert sum(samples for samples, _ in counts.values()) >= total
        failed = ledger.failed_samples()
    assert [(f.id, f.failures) for f in failed] == [(poison.id, 3)]
    assert "CaptureInvalid" in failed[0].reason
    for path in (half / "state").glob("ledger.db*"):
        path.unlink()
    rebuilt = eyas("extract", "--project", half)
    assert rebuilt.code == 3, rebuilt.err
    assert hits[0] == 3, "a lost ledger is no reason to try a poison sample again"
    with Ledger.open_read_only(Layout(half).ledger) as ledger:
        assert ledger.failed_samples() == failed
    monkeypatch.setattr(LocalTarget, "capture", real)
    again = eyas("extract", "--retry-failed", "--project", half)
    assert again.code == 0, again.err
    assert poison.id in store_content(half)


def test_no_room_stops_with_12_or_waits_and_goes_on(
    half: Path, extracted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [2 << 20]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, room[0]))
    stopped = eyas("extract", "--project", half, "--set", "disk.when_full=stop", "--set", "disk.reserve=1MiB")
    assert stopped.code == 12, stopped.err
    assert "it will not fit" in stopped.err or "have to be written" in stopped.err

    def make_room() -> None:
        time.sleep(1.0)
        room[0] = 10**12

    thread = threading.Thread(target=make_room)
    thread.start()
    done = eyas(
        "extract", "--project", half, "--set", "disk.reserve=1MiB", "--set", "disk.look_again_seconds=0.1"
    )
    thread.join()
    assert done.code == 0, done.err
    assert "paused" in done.err
    assert "there is room again" in done.err
    content = store_content(half)
    assert {k: content[k] for k in store_content(extracted)} == store_content(extracted)


def test_a_write_that_fails_for_space_waits_and_loses_nothing(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = os.fsync, [0]

    def full(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/segments/" in path and failures[0] < 6:
            failures[0] += 1
            raise OSError(errno.ENOSPC, "no space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    done = eyas("extract", "--project", half, "--set", "disk.look_again_seconds=0.05")
    assert failures[0] == 6
    assert done.code == 0, done.err
    assert "paused" in done.err
    monkeypatch.undo()
    counts = eyas("status", "--project", half, "--json").json["stages"][2]
    assert counts["state"] == "done"
    assert len(store_content(half)) == counts["done"]


def test_a_budget_holds_the_project_below_its_size(half: Path) -> None:
    done = eyas("extract", "--project", half, "--set", "disk.when_full=stop", "--set", "disk.budget=100kB")
    assert done.code == 12
    assert "budget is 100.0 kB" in done.err


def test_places_that_a_reboot_wipes_are_named(
    half: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = [target]
    monkeypatch.setattr(work, "filesystem_kind", lambda path: "tmpfs" if path in in_memory else "ext4")
    done = eyas("extract", "--project", half)
    assert done.code == 0, done.err
    assert "in memory, where a reboot wipes it: target;" in done.err


def test_the_kind_of_a_filesystem() -> None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    kinds = {point: kind for _, point, kind, *_ in mounts}
    assert filesystem_kind(Path("/proc/self")) == "proc"
    if kinds.get("/dev/shm") == "tmpfs":
        assert filesystem_kind(Path("/dev/shm/not/there/yet")) == "tmpfs"
