"""Atomic files: the old content or the new one, never a mixture."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from eyas.base.files import appending, read_json, set_aside, tree_bytes, write_atomic, write_json


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    calls = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "new")
    assert len(calls) == 1, "a failed fsync must not be tried again on the same file"
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_appending_ends_a_torn_line_first(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"torn')
    with appending(path) as file:
        file.write('{"b": 2}\n')
    assert path.read_text().splitlines() == ['{"a": 1}', '{"torn', '{"b": 2}']


def test_set_aside_moves_with_reason_and_never_overwrites(tmp_path: Path) -> None:
    places = []
    for content in ("first", "second", "third"):
        victim = tmp_path / "segment"
        victim.mkdir()
        (victim / "x").write_text(content)
        places.append(set_aside(victim, tmp_path / "aside", "flipped bit"))
        assert not victim.exists()
    assert [(p / "x").read_text() for p in places] == ["first", "second", "third"]
    reason = read_json(places[1].with_name(places[1].name + ".reason.json"))
    assert reason["reason"] == "flipped bit"
    assert reason["from"].endswith("segment")


def test_tree_bytes_counts_files_only(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {})
    (tmp_path / "a" / "c").write_bytes(b"12345")
    assert tree_bytes(tmp_path) == 3 + 5
    assert tree_bytes(tmp_path / "absent") == 0
