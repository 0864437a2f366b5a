"""``eyas inspect --probe``: a good drafter, and the same with its layers or its mapping moved by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.stages.live_probe import LiveProbe, Tried
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target, write_prompts

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    root = make_project(folder / "p", tiny_target(folder / "model"), count=60)
    words = ["--set", "train.epochs=6", "--set", "regenerate.max_new_tokens=40", "--until", "export"]
    done = eyas("run", "--project", root, *words)
    assert done.code == 0, done.err
    write_prompts(root / "held-out.jsonl", 64)
    return root


def probe(root: Path, folder: Path) -> Any:
    words = ["--target", root.parent / "model", "--prompts", root / "held-out.jsonl", "--limit", "24"]
    return eyas("inspect", folder, *words, "--max-tokens", "40", "--json").json


@pytest.fixture
def drafter(root: Path, tmp_path: Path) -> Path:
    """The export as another tool would leave it: nothing of eyas in it."""
    folder = Path(shutil.copytree(root / "exports" / "eagle3", tmp_path / "drafter"))
    for name in ("README.md", "MANIFEST.json", "seal.json"):
        (folder / name).unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def lengths(found: Any) -> dict[str, float]:
    return {one["name"]: one["acceptance_length"] for one in found["probe"]["tries"]}


def test_a_good_drafter(root: Path) -> None:
    found = probe(root, root / "exports" / "eagle3")
    tries = lengths(found)
    assert found["faults"] == 0
    assert set(tries) == {
        "as served", "as served, with target ids -1", "as served, with target ids +1",
        "as served, with draft ids -1", "as served, with draft ids +1",
        "as served, from layers -1", "as served, from layers +1",
    }  # fmt: skip
    assert max(tries.values()) == tries["as served"] > 1.1
    assert found["probe"]["prompts"] == 24


def test_layers_one_too_low(root: Path, drafter: Path) -> None:
    """Both engines are told the layers below those that it was trained on."""
    config = json.loads((drafter / "config.json").read_text())
    trained = json.loads((root / "store" / "store.json").read_text())
    layers = sorted(find(trained, "aux_layers"))
    config[IDS] = [layer - 1 for layer in layers]
    config["eagle_config"][IDS] = [layer - 2 for layer in layers]
    (drafter / "config.json").write_text(json.dumps(config))
    found = probe(root, drafter)
    tries = lengths(found)
    assert tries["as served, from layers +1"] == pytest.approx(
        lengths(probe(root, root / "exports" / "eagle3"))["as served"]
    )
    assert "probe-layers-shifted" in {f["code"] for f in found["findings"] if f["severity"] == "fault"}


def find(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        if key in value:
            return value[key]
        return next((hit for inner in value.values() if (hit := find(inner, key)) is not None), None)
    return None


def test_a_mapping_one_too_high(root: Path, drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    size = len(tensors["t2d"])
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    moved = (ids + 1).clamp(max=size - 1)
    tensors["d2t"] = moved - torch.arange(len(moved))
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, moved, True)
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})
    found = probe(root, drafter)
    assert lengths(found)["as served, with target ids -1"] > lengths(found)["as served"]
    assert "probe-mapping-shifted" in {f["code"] for f in found["findings"]}


def test_without_the_target_it_cannot_be_tried(root: Path) -> None:
    done = eyas("inspect", root / "exports" / "eagle3", "--probe", "--json")
    assert (done.code, done.json["error"]) == (2, "UsageError")


def test_a_folder_that_computes_nothing_is_not_tried(root: Path, drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})
    done = eyas("inspect", drafter, "--target", root.parent / "model", "--probe", "--json")
    assert done.code == 14
    assert "probe" not in done.json


def tried(name: str, kind: str, accepted: list[int]) -> Tried:
    return Tried(name, kind, np.full(len(accepted), 10), np.array(accepted))


def test_chance_is_no_finding() -> None:
    served = tried("as served", "served", [8, 3, 5, 9, 2, 7, 6, 4])
    better_by_two = tried("as served, from layers +1", "layers", [1, 9, 6, 2, 9, 8, 9, 8])
    assert better_by_two.acceptance_length > served.acceptance_length + 0.05
    assert LiveProbe((served, better_by_two), 8, 80).findings == []
    likely_better = tried("as served, from layers +1", "layers", [7, 6, 7, 9, 5, 9, 6, 7])
    (found,) = LiveProbe((served, likely_better), 8, 80).findings
    assert (found.code, found.severity) == ("probe-shift-in-doubt", "warning")
    always_better = tried("as served, from layers +1", "layers", [12, 6, 9, 13, 6, 10, 9, 9])
    (found,) = LiveProbe((served, always_better), 8, 80).findings
    assert (found.code, found.severity) == ("probe-layers-shifted", "fault")
    nothing = tried("as served", "served", [0, 0, 1, 0, 0, 0, 0, 0])
    (found,) = LiveProbe((nothing,), 8, 80).findings
    assert (found.code, found.severity) == ("probe-accepts-nothing", "warning")
