"""What answers were drawn with: damage to the record is no change, and a change is not lost with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eyas.base.checked import checked_content, with_check
from eyas.pipeline.order import STAGES, stage_named
from eyas.stages.project import Project
from tests.faults.forked import run_here
from tests.projects import make_project, tiny_target

UNTIL_ANSWERS = STAGES[:2]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tiny_target(tmp_path_factory.mktemp("target") / "model")
    root = make_project(tmp_path_factory.mktemp("answered") / "p", target, count=4)
    assert run_here(root, UNTIL_ANSWERS) == 0
    return root


@pytest.fixture
def root(answered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(answered, tmp_path / "p", symlinks=True))


def record(root: Path) -> Path:
    return root / "data" / "answers" / "recipe.json"


def parts(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in record(root).parent.glob("turn-*")}


def test_every_flipped_bit_is_damage_and_not_a_change(root: Path) -> None:
    project, stage = Project.open(root), stage_named("regenerate")
    path = record(root)
    whole, faults, harmless = path.read_bytes(), 0, 0
    meant = json.loads(whole)
    for place in range(len(whole)):
        for bit in (0, 3, 5):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            faults += 1
            damages = [damage for damage in stage.damages(project, deep=False) if damage.path == path]
            if not damages:  # white space: the content is the same
                assert json.loads(bytes(data)) == meant
                harmless += 1
            assert stage.look(project).state != "stale"
    print(f"{faults} flips, {harmless} without effect on the content")
    assert faults == 3 * len(whole)
    assert harmless < faults / 4


def test_a_damaged_record_is_set_aside_and_written_anew(root: Path) -> None:
    path, before, answers = record(root), json.loads(record(root).read_text()), parts(root)
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    assert run_here(root, UNTIL_ANSWERS) == 0
    assert json.loads(path.read_text()) == before
    assert parts(root) == answers
    assert [p for p in (root / "set-aside").iterdir() if p.name.endswith("-recipe.json")]


def test_a_lost_record_does_not_hide_a_change(root: Path) -> None:
    record(root).unlink()
    config, answers = (root / "eyas.toml").read_text(), parts(root)
    (root / "eyas.toml").write_text(config.replace("[regenerate]", "[regenerate]\ntemperature = 0.5"))
    assert run_here(root, UNTIL_ANSWERS) == 2
    assert "recipe.json is lost; the answers carry" in (root / "last-error.txt").read_text()
    (root / "eyas.toml").write_text(config)
    assert run_here(root, UNTIL_ANSWERS) == 0
    assert record(root).exists()
    assert parts(root) == answers


def test_a_record_without_a_digest_is_still_read(root: Path) -> None:
    content = json.loads(record(root).read_text())
    del content["check"]
    record(root).write_text(json.dumps(content))
    stage = stage_named("regenerate")
    assert stage.damages(Project.open(root), deep=False) == []
    assert stage.look(Project.open(root)).state == "done"
    record(root).write_text(json.dumps(content | {"temperature": 0.5}))
    assert stage.look(Project.open(root)).differences == ("temperature: 0.5 -> 0.0",)


def test_contents_with_and_without_digest() -> None:
    assert checked_content(with_check({"a": 1}), {"a"}) == {"a": 1}
    assert checked_content({"a": 1}, {"a"}) == {"a": 1}
    with pytest.raises(ValueError, match="check"):
        checked_content({"a": 1, "b": 2}, {"a"})
    with pytest.raises(ValueError, match="check"):
        checked_content(with_check({"a": 1}) | {"a": 2}, {"a"})
    with pytest.raises(ValueError, match="object"):
        checked_content([1], {"a"})
