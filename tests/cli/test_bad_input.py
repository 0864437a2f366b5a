"""Bad input: a clear error with file, line and hint, exit code 2, and nothing half-written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.cli.command import eyas
from tests.projects import make_project, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


def tree(root: Path) -> dict[str, str]:
    """Everything of a project but logs and state."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in ("logs", "state")
    }


GOOD = '{"turns": ["tell rain about the hill"]}\n'


@pytest.mark.parametrize(
    ("text", "more", "needles"),
    [
        ("", "", ["prompts.jsonl", "empty"]),
        (GOOD + "{not json}\n", "", ["prompts.jsonl", "2"]),
        (GOOD + '{"turns": ["half a li', "", ["prompts.jsonl", "2", "torn"]),
        (GOOD + '{"messages": [{"role": "wizard", "content": "x"}]}\n', "", ["2", "wizard"]),
        (GOOD + '{"something": "else"}\n', "", ["2"]),
        (GOOD + '{"input_ids": [1, 2, 99999], "spans": [[1, 3]]}\n', "", ["2", "99999"]),
    ],
)
def test_data_that_cannot_be_read(
    target: Path, tmp_path: Path, text: str, more: str, needles: list[str]
) -> None:
    root = make_project(tmp_path / "p", target, more=more)
    (root / "prompts.jsonl").write_text(text)
    before = tree(root)
    done = eyas("prepare", "--project", root)
    assert done.code == 2, done.err
    for needle in needles:
        assert needle in done.err
    assert tree(root) == before


def test_unreadable_records_can_be_counted_instead(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    with open(root / "prompts.jsonl", "a") as file:
        file.write("{not json}\n")
    done = eyas("prepare", "--project", root, "--set", "data.on_unreadable=skip")
    assert done.code == 0, done.err
    stats = json.loads((root / "data" / "stats.json").read_text())
    assert stats["records"] == stats["kept"] + sum(stats["dropped"].values())
    assert sum(stats["dropped"].values()) == 1


def test_nothing_supervised_anywhere(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    (root / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    done = eyas("prepare", "--project", root, "--set", "regenerate.enabled=false")
    assert done.code == 2
    assert "supervised" in done.err


def test_prompt_longer_than_the_limit(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    done = eyas(
        "run", "--project", root, "--set", "data.max_seq_len=16", "--set", "regenerate.max_new_tokens=8"
    )
    assert done.code == 2, done.err
    assert "too long" in done.err


def test_a_target_without_a_chat_template(target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in target.iterdir():
        if path.name != "chat_template.jinja":
            (bare / path.name).write_bytes(path.read_bytes())
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    root = make_project(tmp_path / "p", bare)
    done = eyas("prepare", "--project", root)
    assert done.code == 2
    assert "chat template" in done.err
    assert "chat_template.jinja" in done.err


def test_a_draft_vocabulary_larger_than_what_was_seen(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    done = eyas("run", "--project", root, "--until", "train", "--set", "drafter.vocab_size=330")
    assert done.code == 2
    assert "330" in done.err
    assert not (root / "drafter" / "vocabulary").exists()


def test_a_project_of_a_newer_format(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    path = root / "eyas.toml"
    path.write_text(path.read_text().replace("format = 1", "format = 7"))
    done = eyas("run", "--project", root)
    assert done.code == 2
    assert "newer eyas" in done.err


def test_unknown_keys_verbs_and_options(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    done = eyas("run", "--project", root, "--set", "trian.lr=1")
    assert done.code == 2
    assert "did you mean train?" in done.err
    assert eyas("runn").code == 2
    assert eyas("run", "--projekt", root).code == 2
    assert eyas("run", "--project", root, "--redo", "exract").code == 2
    missing = eyas("init", tmp_path / "n", "--model", target, "--data", tmp_path / "nowhere.jsonl")
    assert missing.code == 2
    assert not (tmp_path / "n").exists()
    again = eyas("init", root, "--model", target, "--data", root / "prompts.jsonl")
    assert again.code == 2


def test_stages_in_the_wrong_order(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    for name in ("regenerate", "extract", "train", "evaluate", "export"):
        done = eyas(name, "--project", root)
        assert done.code == 2, name
        assert "eyas run" in done.err


@pytest.mark.parametrize("verb", [("init",), ("inspect",), ("serve", "fake")])
@pytest.mark.parametrize("option", ["--project", "--host"])
def test_a_verb_about_no_project_takes_no_option_about_one(
    target: Path, tmp_path: Path, verb: tuple[str, ...], option: str
) -> None:
    """It would be accepted and do nothing."""
    more = ("--model", target, "--data", tmp_path / "none.jsonl") if verb == ("init",) else ()
    refused = eyas(*verb, target, *more, option, tmp_path / "p")
    assert refused.code == 2
    assert option in refused.err
    assert not (tmp_path / "p").exists()
