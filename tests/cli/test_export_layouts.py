"""``eyas export --to``: further layouts beside the common folder, kept up to date, and taken in again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.base.seal import is_sealed
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    root = make_project(folder / "p", tiny_target(folder / "model"), count=12)
    done = eyas("run", "--project", root)
    assert done.code == 0, done.err
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "p", symlinks=True))


def test_layouts_on_demand(root: Path) -> None:
    exports = root / "exports"
    before = (exports / "eagle3" / "model.safetensors").stat().st_mtime_ns
    done = eyas("export", "--to", "speculators", "--to", "sglang", "--project", root, "--json")
    assert done.code == 0, done.err
    assert done.json["numbers"]["export"]["layouts"] == "both, sglang, speculators"
    assert done.json["numbers"]["export"]["largest_difference"] < 1e-4
    assert {p.name for p in exports.iterdir()} == {"eagle3", "eagle3-sglang", "eagle3-speculators"}
    assert all(is_sealed(folder) for folder in exports.iterdir())
    assert (exports / "eagle3" / "model.safetensors").stat().st_mtime_ns == before
    for name in ("eagle3-sglang", "eagle3-speculators"):
        assert eyas("inspect", exports / name, "--json").json["faults"] == 0
    card = (exports / "eagle3-sglang" / "README.md").read_text()
    assert "sglang.launch_server" in card
    assert "vllm.entrypoints" not in card
    again = eyas("export", "--to", "speculators", "--project", root, "--json")
    assert again.json["ran"] == []
    # what was asked for once is looked after
    path = exports / "eagle3-speculators" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(bytes(content))
    assert eyas("verify", "--deep", "--project", root).code == 14
    # and never left behind: when the export is made anew, it is what the configuration asks for
    text = (root / "eyas.toml").read_text()
    (root / "eyas.toml").write_text(text + '[export]\nto = ["vllm"]\n')
    assert eyas("export", "--redo", "--project", root).code == 0
    assert {p.name for p in exports.iterdir()} == {"eagle3", "eagle3-vllm"}
    assert len(list((root / "set-aside").rglob("*speculators*"))) >= 1


def test_the_gate_holds_for_every_layout(root: Path) -> None:
    words = ("--set", "export.min_acceptance_length=9", "--project", root, "--json")
    done = eyas("export", "--to", "vllm", *words)
    assert (done.code, done.json["error"]) == (15, "GateFailed")
    assert not (root / "exports" / "eagle3-vllm").exists()


def test_an_unknown_layout(root: Path) -> None:
    assert eyas("export", "--to", "onnx", "--project", root).code == 2


@pytest.mark.parametrize("layout", ["sglang", "vllm", "speculators"])
def test_training_goes_on_from_any_layout(root: Path, tmp_path: Path, layout: str) -> None:
    assert eyas("export", "--to", layout, "--project", root).code == 0
    folder = Path(shutil.copytree(root / "exports" / f"eagle3-{layout}", tmp_path / "drafter"))
    shutil.rmtree(root / "drafter")
    shutil.rmtree(root / "exports")
    text = (root / "eyas.toml").read_text()
    (root / "eyas.toml").write_text(text.replace("[train]", f'[train]\nstart_from = "{folder}"'))
    done = eyas("run", "--project", root, "--set=train.lr=1e-30")
    assert done.code == 0, done.err
    started, ended = (
        load_file(where / "model.safetensors") for where in (folder, root / "exports" / "eagle3")
    )
    for name, tensor in ended.items():
        assert torch.equal(tensor, started[name.replace("midlayer.", "layers.0.")
                                           if layout == "speculators" else name])  # fmt: skip
    assert json.loads((root / "reports" / "evaluation.json").read_text())["acceptance_length"] >= 1
