"""Older layouts end to end: out and in again with the same bits, and nothing unfit gets in."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.base.errors import DataError
from eyas.base.layout import Layout
from eyas.pipeline.order import STAGES
from eyas.stages.exchange.pickles import CodeRefused, read_pickle, write_pickle
from eyas.stages.project import Project
from eyas.store.imports import read_imports, to_recheck
from eyas.store.layouts.tensor_file import FileTensor
from tests.cli.command import eyas
from tests.faults.forked import run_here
from tests.faults.small import LONG, SEED
from tests.projects import make_project, store_content, tiny_target

UNTIL_EXTRACT = STAGES[:3]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose samples are captured."""
    target = tiny_target(tmp_path_factory.mktemp("target") / "model")
    root = make_project(tmp_path_factory.mktemp("source") / "p", target, count=5)
    assert run_here(root, UNTIL_EXTRACT) == 0
    return root


def emptied(source: Path, root: Path) -> Path:
    """The same project before its first capture."""
    shutil.copytree(source, root, symlinks=True)
    shutil.rmtree(root / "store")
    for path in (root / "state").glob("ledger.db*"):
        path.unlink()
    return root


def exported(source: Path, folder: Path, layout: str, *words: str) -> Path:
    done = eyas("store", "export", folder, "--layout", layout, "--project", source, *words)
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("layout", ["rows", "speculators", "safetensors"])
def test_round_trip(source: Path, tmp_path: Path, layout: str) -> None:
    post = ("--last", "post_norm")
    folder = exported(source, tmp_path / "out", layout, *post)
    content = store_content(source)
    assert len([p for p in folder.rglob("*") if p.is_file()]) == len(content) + 1
    root = emptied(source, tmp_path / "p")
    words = ("store", "import", folder, "--layout", layout, *post, "--project", root, "--json")
    plain = eyas(*words[:-1], "--dry-run")
    assert plain.err.splitlines()[-1] == (
        f"next: eyas store import {folder} --layout {layout} --last post_norm --project {root}"
    )
    dry = eyas(*words, "--dry-run")
    assert dry.json["fit"] == len(content)
    assert not (root / "store").exists()
    done = eyas(*words)
    assert done.code == 0, done.out
    assert (done.json["stored"], done.json["left_alone"]) == (len(content), [])
    assert store_content(root) == content
    stages = eyas("status", "--project", root, "--json").json["stages"]
    assert next(s["done"] for s in stages if s["name"] == "extract") == len(content)
    again = eyas(*words)
    assert (again.json["stored"], again.json["known"]) == (0, len(content))
    assert eyas("verify", "--deep", "--project", root).code == 0
    assert len(to_recheck(Layout(root))) == min(16, len(content))
    assert run_here(root, UNTIL_EXTRACT) == 0, (root / "last-error.txt").read_text()
    assert to_recheck(Layout(root)) == []
    assert read_imports(Layout(root))[0]["rechecked_at"]
    assert store_content(root) == content


def test_states_from_before_the_norm(source: Path, tmp_path: Path) -> None:
    folder = exported(source, tmp_path / "out", "speculators")
    root = emptied(source, tmp_path / "p")
    done = eyas("store", "import", folder, "--project", root, "--json")
    assert done.json["stored"] == len(store_content(source))
    assert run_here(root, UNTIL_EXTRACT) == 0, (root / "last-error.txt").read_text()


def test_an_import_of_other_states_does_not_pass_the_recheck(source: Path, tmp_path: Path) -> None:
    folder = exported(source, tmp_path / "out", "rows")
    for path in folder.rglob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        content["aux_hidden_state"] = content["aux_hidden_state"].roll(1, dims=1)
        torch.save(content, path)
    root = emptied(source, tmp_path / "p")
    assert eyas("store", "import", folder, "--project", root).code == 0
    assert run_here(root, UNTIL_EXTRACT) == 2
    assert "cannot be captured again" in (root / "last-error.txt").read_text()
    assert to_recheck(Layout(root)) != []


def test_an_import_waits_for_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported(source, tmp_path / "out", "rows", "--last", "post_norm")
    root = emptied(source, tmp_path / "p")
    real, failures, looks = os.fsync, [0], [0]

    def full(descriptor: int) -> None:
        if "/store/" in os.readlink(f"/proc/self/fd/{descriptor}") and failures[0] < 6:
            failures[0] += 1
            raise OSError(errno.ENOSPC, "no space left on device")
        real(descriptor)

    def usage(path: object) -> Usage:
        looks[0] += 1
        return Usage(10**12, 0, 0 if looks[0] <= 3 else 10**12)

    words = ("store", "import", folder, "--last", "post_norm", "--project", root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 0))
    stopped = eyas(*words, "--set", "disk.when_full=stop")
    assert stopped.code == 12, stopped.err
    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(os, "fsync", full)
    done = eyas(*words, "--set", "disk.look_again_seconds=0.05")
    assert done.code == 0, done.err
    assert (failures[0], looks[0] > 3) == (6, True)
    assert "there is room again" in done.err
    monkeypatch.undo()
    assert store_content(root) == store_content(source)


def test_a_damaged_record_of_imports_is_set_aside(source: Path, tmp_path: Path) -> None:
    folder = exported(source, tmp_path / "out", "rows", "--last", "post_norm")
    root = emptied(source, tmp_path / "p")
    assert eyas("store", "import", folder, "--last", "post_norm", "--project", root).code == 0
    path = root / "store" / "imports.json"
    text = path.read_text()
    names = to_recheck(Layout(root))
    path.write_text(text.replace(names[0], names[0][::-1]))
    assert eyas("verify", "--project", root).code == 14
    assert run_here(root, UNTIL_EXTRACT) == 0, (root / "last-error.txt").read_text()
    assert [p for p in (root / "set-aside").iterdir() if p.name.endswith("imports.json")]
    assert store_content(root) == store_content(source)
    old = json.loads(text)
    del old["check"]
    path.write_text(json.dumps(old))
    assert to_recheck(Layout(root)) == names  # a record from before the digest


class RunsCode:
    """Makes a file when it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.mark}",))


def test_what_is_unfit_is_named_and_left_alone(source: Path, tmp_path: Path) -> None:
    folder = exported(source, tmp_path / "out", "rows")
    paths = sorted(folder.rglob("*.ckpt"))
    assert len(paths) >= 5
    before = torch.load(paths[0], weights_only=True)
    torch.save({**before, "more": RunsCode(tmp_path / "ran")}, paths[0])
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    flipped = bytearray(paths[2].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    paths[2].write_bytes(flipped)
    other = torch.load(paths[3], weights_only=True)
    other["input_ids"][0] += 1
    torch.save(other, paths[3])
    poisoned = torch.load(paths[4], weights_only=True)
    poisoned["aux_hidden_state"][0, 1, 3] = float("nan")
    torch.save(poisoned, paths[4])
    bytes_before = [path.read_bytes() for path in paths]
    root = emptied(source, tmp_path / "p")
    done = eyas("store", "import", folder, "--project", root, "--json")
    assert done.code == 14
    left = {Path(entry["path"]): (entry["kind"], entry["why"]) for entry in done.json["left_alone"]}
    kinds = [left[path][0] for path in paths[:5]]
    assert kinds == ["refused", "damaged", "damaged", "unmatched", "damaged"]
    assert "system" in left[paths[0]][1]
    assert "not finite" in left[paths[4]][1]
    assert not (tmp_path / "ran").exists()
    assert done.json["stored"] == len(paths) - 5
    assert [path.read_bytes() for path in paths] == bytes_before


def test_without_samples_spans_come_from_the_mask(source: Path, tmp_path: Path) -> None:
    folder = exported(source, tmp_path / "out", "rows")
    root = emptied(source, tmp_path / "p")
    shutil.rmtree(root / "data" / "samples")
    done = eyas("store", "import", folder, "--project", root, "--json")
    assert done.json["stored"] == len(store_content(source))


@pytest.mark.skipif(not LONG, reason="18,421 files: EYAS_LONG_FAULTS=1")
def test_as_many_files_as_a_real_run_had(source: Path, tmp_path: Path) -> None:
    """rows_A-B folders of one .pt a sample; one in a thousand truncated, holed, foreign or running code."""
    root = emptied(source, tmp_path / "p")
    shutil.rmtree(root / "data" / "samples")  # spans come from the files themselves
    resolved = Project.open(root).resolved
    width, num_layers = resolved.facts.hidden_size, len(resolved.aux_layers)
    rng, unfit = np.random.default_rng(SEED), dict[str, str]()
    for number in range(18_421):
        first = number // 2000 * 2000
        path = tmp_path / "out" / f"rows_{first}-{first + 2000}" / f"data_{number}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = torch.tensor([number % 300, number // 300, *rng.integers(0, 300, 6)])
        aux = torch.from_numpy(rng.standard_normal((1, 8, num_layers * width), dtype=np.float32))
        last = torch.from_numpy(rng.standard_normal((1, 8, width), dtype=np.float32))
        content: dict[str, object] = {
            "input_ids": tokens,
            "loss_mask": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]),
            "hidden_state": last,
            "aux_hidden_state": aux,
        }
        kind = number // 1000 % 4 if number % 1000 == 999 else None
        if kind == 0:
            content["more"] = RunsCode(tmp_path / "ran")
        if kind == 1:
            aux[:, 2:4] = 0
        torch.save(content, path)
        if kind == 2:
            path.write_bytes(path.read_bytes()[:-700])
        if kind == 3:
            path.write_bytes(rng.bytes(5000))
        if kind is not None:
            unfit[str(path)] = "refused" if kind == 0 else "damaged"
    done = eyas("store", "import", tmp_path / "out", "--last", "post_norm", "--project", root, "--json")
    assert done.code == 14, done.err
    assert {left["path"]: left["kind"] for left in done.json["left_alone"]} == unfit
    assert done.json["stored"] == 18_421 - len(unfit)
    assert not (tmp_path / "ran").exists()
    print(f"seed {SEED}: {len(unfit)} unfit files among 18,421")
    assert len(unfit) == 18


def test_another_recipe_is_refused(source: Path, tmp_path: Path) -> None:
    folder = exported(source, tmp_path / "out", "rows")
    root = emptied(source, tmp_path / "p")
    assert eyas("store", "import", folder, "--project", root).code == 0
    done = eyas("store", "import", folder, "--fingerprint", "other", "--project", root)
    assert done.code == 2
    assert "target_fingerprint" in done.err


def test_pickles_of_both_forms(tmp_path: Path) -> None:
    states = FileTensor("BF16", np.arange(12, dtype="<u2").reshape(3, 4))
    write_pickle(tmp_path / "a.pt", {"x": states, "layers": [states, states]})
    found = read_pickle(tmp_path / "a.pt")
    assert isinstance(found["x"], FileTensor)
    assert found["x"].dtype == "BF16"
    np.testing.assert_array_equal(found["x"].array, states.array)
    assert len(found["layers"]) == 2  # type: ignore[arg-type]
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert list(read_pickle(tmp_path / "old.pt")) == ["x"]
    torch.save({"x": RunsCode(tmp_path / "ran")}, tmp_path / "bad.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CodeRefused):
        read_pickle(tmp_path / "bad.pt")


@pytest.mark.parametrize(
    "pickled",
    [
        b"cposix\nsystem\n(S'touch ran'\ntR.",
        b"(S'touch ran'\niposix\nsystem\n.",
        b"(cposix\nsystem\nS'touch ran'\no.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x09touch ran\x85R.",
        b"\x80\x02cposix\nsystem\nX\x09\x00\x00\x00touch ran\x85\x81.",
    ],
    ids=["REDUCE", "INST", "OBJ", "STACK_GLOBAL", "NEWOBJ"],
)
def test_every_way_to_ask_for_code_is_refused(pickled: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pt"
    path.write_bytes(pickled)
    with pytest.raises(CodeRefused):
        read_pickle(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad/data.pkl", pickled)
        archive.writestr("bad/version", "3\n")
    with pytest.raises(CodeRefused):
        read_pickle(path)
    assert not (tmp_path / "ran").exists()


def test_bytes_that_are_no_pickle_ask_for_nothing(tmp_path: Path) -> None:
    rng, refused = np.random.default_rng(3), 0
    for first in range(256):
        for _ in range(4):
            (tmp_path / "x.pt").write_bytes(bytes([first]) + rng.bytes(500))
            with pytest.raises(DataError) as caught:
                read_pickle(tmp_path / "x.pt")
            refused += isinstance(caught.value, CodeRefused)
            assert "weights_only" not in str(caught.value)
    assert refused <= 4  # those that do name something right at their beginning
