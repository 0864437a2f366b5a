"""A dump folder holds back at 80% of what it can hold, counting what was promised."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas_engine import room as room_module
from eyas_engine.room import Room


def test_the_byte_limit_counts_what_is_there_and_what_is_promised(tmp_path: Path) -> None:
    room = Room(tmp_path, 1000, 0.8)
    assert room.refuse("first-name", 500) is None
    assert room.refuse("second-name", 300) is None
    assert str(room.refuse("third-name", 1)).startswith("full: ")  # 801 of 800
    (tmp_path / "first-name.dump").write_bytes(bytes(500))
    assert str(room.refuse("third-name", 1)).startswith("full: ")  # there now, and promised no more
    (tmp_path / "first-name.dump").unlink()
    assert room.refuse("third-name", 500) is None
    assert str(room.refuse("fourth-name", 1)).startswith("full: ")


def test_a_promise_that_is_not_kept_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(room_module.time, "monotonic", lambda: now[0])
    room = Room(tmp_path, 1000, 0.8)
    assert room.refuse("first-name", 800) is None
    now[0] = 59.0
    assert room.refuse("second-name", 800) is not None
    now[0] = 61.0
    assert room.refuse("second-name", 800) is None


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free blocks of a filesystem of 10,000 blocks of 4,096 bytes."""
    blocks = [1000]
    told = lambda path: SimpleNamespace(f_blocks=10_000, f_frsize=4096, f_bavail=blocks[0])  # noqa: E731
    monkeypatch.setattr(room_module.os, "statvfs", told)
    return blocks


def test_what_the_filesystem_has_free_bounds_too(tmp_path: Path, free: list[int]) -> None:
    room = Room(tmp_path, 0, 0.8)
    assert room.refuse("first-name", 799 * 4096) is None  # others fill 90% of the disk: no matter
    assert str(room.refuse("second-name", 2 * 4096)).startswith("full: ")
    free[0] = 100
    assert str(room.refuse("third-name", 1)).startswith("full: ")


def test_a_dump_that_has_landed_counts_once(tmp_path: Path, free: list[int]) -> None:
    room = Room(tmp_path, 0, 0.8)
    (tmp_path / "first-name.dump").write_bytes(bytes(400 * 4096))
    free[0] = 600
    assert room.refuse("second-name", 400 * 4096) is None  # 800 of 400 + 600
    assert str(room.refuse("third-name", 1)).startswith("full: ")


def test_the_smaller_of_limit_and_filesystem_counts(tmp_path: Path, free: list[int]) -> None:
    room = Room(tmp_path, 500 * 4096, 0.8)
    assert str(room.refuse("first-name", 401 * 4096)).startswith("full: ")
    free[0] = 100
    assert str(room.refuse("first-name", 81 * 4096)).startswith("full: ")
    assert room.refuse("first-name", 80 * 4096) is None


def test_a_folder_that_is_gone_has_no_room(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    room = Room(folder, 0, 0.8)
    assert room.refuse("first-name", 1) is None
    os.rmdir(folder)
    assert str(room.refuse("second-name", 1)).startswith("full: the dump folder cannot be read")
