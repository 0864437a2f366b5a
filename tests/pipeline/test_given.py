"""What a run was given by ``--set``: which attempt counts, and what of it is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import eyas as package
from eyas.base.errors import RecipeChanged
from eyas.base.layout import Layout
from eyas.cli.common import Common
from eyas.pipeline.attempt import Attempt, may_be_written_down
from eyas.pipeline.given import given_to_last_run, name_what_was_given
from tests.projects import make_project

REFUSED = {"outcome": "recipe_changed", "exit_code": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_project(tmp_path / "p", tmp_path / "model")


def attempt(root: Path, number: int, *overrides: str, verb: str = "run", **end: object) -> Attempt:
    made = Attempt(root / "logs", number, verb, overrides)
    if end:
        made.event("attempt ended", **end)
    made.close()
    return made


def given(root: Path) -> tuple[str, ...] | None:
    found = given_to_last_run(Layout(root))
    return None if found is None else found.values


def test_which_attempt_counts(root: Path) -> None:
    assert given(root) is None
    attempt(root, 1, "train.lr=0.5")
    assert given(root) == ("train.lr=0.5",)
    attempt(root, 2, "train.lr=0.25", **REFUSED)
    attempt(root, 3, verb="recover", outcome="done")
    assert given(root) == ("train.lr=0.5",), "neither a refused run nor a recovery is a run"
    attempt(root, 4, "train.epochs=3", outcome="stopped", exit_code=143)
    assert given(root) == ("train.epochs=3",)
    attempt(root, 5, "train.epochs=3", outcome="done")
    assert given(root) is None
    attempt(root, 6)
    assert given(root) is None


def test_a_refusal_names_what_the_run_before_was_given(root: Path) -> None:
    attempt(root, 1, "train.lr=0.5", "train.epochs=3")
    attempt(root, 2)  # the one that refuses
    for overrides, named in (
        ((), True), (("train.lr=0.5",), True), (("train.epochs=3", "seed=1", "train.lr=0.5"), False)
    ):  # fmt: skip
        error = RecipeChanged("other", hint="take it back")
        name_what_was_given(error, Layout(root), overrides, 2)
        words = (
            "eyas run --set train.lr=0.5 --set train.epochs=3 (as attempt-0001 was given), or take it back"
        )
        assert error.hint == (words if named else "take it back")


@pytest.mark.parametrize("value", ["train.lr=fast", "trian.lr=0.5", "train.lr", "="])
def test_a_damaged_log_stops_nobody(root: Path, value: str) -> None:
    attempt(root, 1, value)
    assert given(root) is None
    assert Common(root).as_last_run().open().overrides == ()


def test_what_may_hold_a_password_is_not_written_down(root: Path) -> None:
    secrets = [
        "notify.urls=['json://me:hush@h']",
        " notify.urls=['json://me:hush@h']",
        "notify={urls=['hush']}",
    ]
    assert [may_be_written_down(value) for value in [*secrets, "train.lr=1", "notifying.x=1"]] == [
        False, False, False, True, True
    ]  # fmt: skip
    made = attempt(root, 1, *secrets, "train.lr=0.5")
    text = (made.folder / "events.jsonl").read_text()
    assert "hush" not in text
    assert json.loads(text.splitlines()[0])["detail"]["set"] == ["train.lr=0.5"]
    assert "hush" not in Common(root, set=(*secrets, "train.lr=0.5")).suffix
    assert Common(root, set=("train.lr=0.5",)).suffix == f" --project {root} --set train.lr=0.5"


def test_verbs_and_the_api_look_at_the_run_as_it_was_given(root: Path) -> None:
    attempt(root, 1, "train.lr=0.5", "train.epochs=3")
    common = Common(root, set=("train.epochs=4",)).as_last_run()
    assert common.set == ("train.lr=0.5", "train.epochs=3", "train.epochs=4")
    config = common.open().config
    assert (config.train.lr, config.train.epochs) == (0.5, 4)
    opened = package.open(root, ["train.epochs=4"])
    assert opened._project.config == config
