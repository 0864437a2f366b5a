"""Training that goes on from a trained drafter, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.command import eyas
from tests.projects import make_project, tiny_target

STILL = "--set=train.lr=1e-30"
"""A rate at which no float32 weight moves: what training ends with is what it began with."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def captured(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_project(tmp_path_factory.mktemp("captured") / "p", target, count=14)
    assert eyas("run", "--project", root, "--until", "extract").code == 0
    return root


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of another project, with other prompts and so another draft vocabulary."""
    root = make_project(tmp_path_factory.mktemp("earlier") / "p", target, count=6)
    assert eyas("run", "--project", root).code == 0
    return root / "exports" / "eagle3"


@pytest.fixture
def project(captured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(captured, tmp_path / "p", symlinks=True))


def start_from(project: Path, folder: Path, more: str = "") -> None:
    text = (project / "eyas.toml").read_text()
    (project / "eyas.toml").write_text(text.replace("[train]", f'[train]\nstart_from = "{folder}"\n{more}'))


def test_weights_and_vocabulary_are_those_of_the_drafter(project: Path, drafter: Path) -> None:
    start_from(project, drafter)
    done = eyas("run", "--project", project, STILL)
    assert done.code == 0, done.err
    assert "goes on from" in done.err
    old = load_file(drafter / "model.safetensors")
    new = load_file(project / "exports" / "eagle3" / "model.safetensors")
    assert set(old) == set(new)
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]), name


def test_training_moves_them(project: Path, drafter: Path) -> None:
    start_from(project, drafter)
    assert eyas("run", "--project", project).code == 0
    old = load_file(drafter / "model.safetensors")
    new = load_file(project / "exports" / "eagle3" / "model.safetensors")
    assert torch.equal(old["d2t"], new["d2t"])
    assert not torch.equal(old["fc.weight"], new["fc.weight"])


def test_another_drafter_over_checkpoints_is_refused(project: Path, drafter: Path, tmp_path: Path) -> None:
    start_from(project, drafter)
    assert eyas("run", "--project", project, "--until", "train").code == 0
    other = Path(shutil.copytree(drafter, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"note": 1}))
    text = (project / "eyas.toml").read_text()
    (project / "eyas.toml").write_text(text.replace(str(drafter), str(other)))
    refused = eyas("run", "--project", project)
    assert refused.code == 2
    assert "start" in refused.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("layers", ["layers", "extract.aux_layers"]),
        ("shape", ["drafter.intermediate_size"]),
        ("tensor", ["fc.weight is missing"]),
        ("gone", ["config.json"]),
        ("both", ["warm_start"]),
    ],
)
def test_what_does_not_fit_is_refused(
    project: Path, drafter: Path, tmp_path: Path, change: str, words: list[str]
) -> None:
    other = Path(shutil.copytree(drafter, tmp_path / "other"))
    more = ""
    weights = load_file(other / "model.safetensors")
    if change == "layers":
        save_file(weights, other / "model.safetensors", metadata={"eyas.aux_layers": "[0, 1, 2]"})
    elif change == "shape":
        text = (project / "eyas.toml").read_text()
        (project / "eyas.toml").write_text(text + "\n[drafter]\nintermediate_size = 8\n")
    elif change == "tensor":
        del weights["fc.weight"]
        save_file(weights, other / "model.safetensors")
    elif change == "gone":
        shutil.rmtree(other)
    else:
        more = 'warm_start = "head"\n'
    start_from(project, other, more)
    refused = eyas("run", "--project", project)
    assert refused.code == 2, refused.err
    for word in words:
        assert word in refused.err
    assert not (project / "drafter" / "checkpoints").exists() or not list(
        (project / "drafter" / "checkpoints").iterdir()
    )
