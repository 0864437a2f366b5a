"""A hint is a command that can be pasted where the reader stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.cli.hints import at_project
from eyas.cli.main import VERB_NAMES
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target

VERBS = ("run", "store repair", "status", "stop", "train")


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("eyas run", "eyas run --project p"),
        ("take it back, or: eyas run --redo x", "take it back, or: eyas run --project p --redo x"),
        ("eyas stop ends it; eyas run", "eyas stop --project p ends it; eyas run --project p"),
        ("eyas store repair", "eyas store repair --project p"),
        ("eyas train --project q", "eyas train --project q"),
        ("eyas running-late", "eyas running-late"),
        ("fix line 3 of eyas.toml", "fix line 3 of eyas.toml"),
        ("eyas inspect DIR", "eyas inspect DIR"),
    ],
)
def test_commands_name_the_project(hint: str, expected: str) -> None:
    assert at_project(hint, "p", VERBS) == expected
    assert at_project(hint, None, VERBS) == hint


def test_a_project_with_a_space_is_quoted() -> None:
    assert at_project("eyas run", "my run", VERBS) == "eyas run --project 'my run'"


def test_the_command_line_uses_it(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"))
    said = eyas("train", "--project", root, "--json")
    assert said.code == 2
    assert said.json["hint"] == f"eyas run --project {root} does all stages in order"
    assert "store repair" in VERB_NAMES
