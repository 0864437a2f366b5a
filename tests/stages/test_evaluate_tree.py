"""``evaluate.tree``: trees beside the chain, through the whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.stages.evaluate.stage import evaluation_recipe
from eyas.stages.project import Project
from eyas.stages.records import final_checkpoint
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target

TREE = ["--set", "evaluate.tree.depth=3", "--set", "evaluate.tree.top_k=3", "--set",
        "evaluate.tree.total_tokens=12"]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    root = make_project(folder / "p", tiny_target(folder / "model"), count=12)
    done = eyas("run", "--project", root, *TREE)
    assert done.code == 0, done.err
    return root


def test_trees_are_measured_beside_the_chain(root: Path) -> None:
    report = json.loads((root / "reports" / "evaluation.json").read_text())
    tree = report["tree"]
    assert (tree["depth"], tree["top_k"], tree["total_tokens"]) == (3, 3, 12)
    assert tree["lossless"]["equal"] == tree["lossless"]["num_prompts"] == report["num_answers"]
    assert tree["acceptance_length"] == pytest.approx(1 + sum(tree["accepted"]) / tree["rounds"])
    assert tree["acceptance_length"] >= report["acceptance_length"] > 1
    assert tree["domains"].keys() == report["domains"].keys()
    page = eyas("report", "--format", "md", "--stdout", "--project", root).out
    assert f"{tree['acceptance_length']:.3f} tokens per target forward, 12 drafts a round" in page


def test_without_a_tree_the_recipe_is_what_it_was(root: Path) -> None:
    project = Project.open(root, ())
    checkpoint = final_checkpoint(project)
    assert checkpoint is not None
    assert "tree" not in evaluation_recipe(project, checkpoint)
    view = eyas("status", "--project", root, "--json").json
    assert [s["state"] for s in view["stages"] if s["name"] == "evaluate"] == ["stale"]


def test_prediction_by_domain_place_prompt_and_tree(root: Path) -> None:
    report = json.loads((root / "reports" / "evaluation.json").read_text())
    found = report["prediction"]
    assert set(found["domains"]) <= {"even", "odd"}
    for group in (
        *found["domains"].values(),
        *(p["rows"] for p in found["places"] + found["prompt_lengths"]),
    ):
        assert [row["num_drafts"] for row in group] == list(range(1, 9))
        assert all(row["low"] <= row["acceptance_length"] <= row["high"] for row in group)
    assert [place["from_token"] for place in found["places"]] == [0]  # answers of at most 12 tokens
    trees = found["trees"]
    assert [(tree["depth"], tree["top_k"], tree["total_tokens"]) for tree in trees] == [
        (3, 3, 6), (3, 3, 12), (3, 3, 24)
    ]  # fmt: skip
    chain = found["rows"][2]["acceptance_length"]
    assert chain <= trees[1]["acceptance_length"] <= trees[2]["acceptance_length"] + 1e-9
