"""Sealed folders: a folder without its seal does not exist, and every change to one is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eyas.base.errors import SealBroken
from eyas.base.seal import SEAL_NAME, is_sealed, read_seal, require_seal, seal_faults, sealed_folder


def make(folder: Path) -> Path:
    with sealed_folder(folder, {"step": 3}) as inside:
        (inside / "a.bin").write_bytes(bytes(range(256)))
        (inside / "sub").mkdir()
        (inside / "sub" / "b.txt").write_text("hello")
    return folder


def test_a_sealed_folder_tells_what_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    assert is_sealed(folder)
    assert read_seal(folder)["about"] == {"step": 3}
    assert set(read_seal(folder)["files"]) == {"a.bin", "sub/b.txt"}
    assert seal_faults(folder) == []
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_error_inside_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), sealed_folder(tmp_path / "x", {}) as inside:
        (inside / "a").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    with pytest.raises(FileExistsError), sealed_folder(folder, {}):
        pass
    assert seal_faults(folder) == []


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    seed = 7
    rng = random.Random(seed)
    faults = 0
    for name in ("a.bin", "sub/b.txt"):
        path = folder / name
        original = path.read_bytes()
        for _ in range(50):
            broken = bytearray(original)
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            assert seal_faults(folder) == [f"{name}: content changed since it was sealed"]
            faults += 1
        path.write_bytes(original)
    print(f"seed {seed}, {faults} faults")
    assert faults == 100
    assert seal_faults(folder) == []


def test_missing_resized_foreign_and_unreadable(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    (folder / "foreign").write_text("?")
    assert seal_faults(folder) == ["foreign: not part of the seal"]
    (folder / "foreign").unlink()
    (folder / "a.bin").write_bytes(b"short")
    assert seal_faults(folder, deep=False) == ["a.bin: 5 bytes, sealed with 256"]
    (folder / "a.bin").unlink()
    assert seal_faults(folder) == ["a.bin: missing"]
    with pytest.raises(SealBroken, match="damaged"):
        require_seal(folder)
    (folder / SEAL_NAME).write_text("{")
    assert seal_faults(folder)[0].startswith(f"{SEAL_NAME}: ")
