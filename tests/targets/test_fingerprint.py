"""Weight files and their fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash

import eyas.targets.fingerprint as module
from eyas.base.errors import TargetError
from eyas.targets.fingerprint import weights_fingerprint
from eyas.targets.weight_files import weight_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(os.urandom(100_000))
    (tmp_path / "b.safetensors").write_bytes(b"b" * 10)
    return tmp_path


def test_against_a_hash_by_hand(folder: Path) -> None:
    found = weights_fingerprint(folder)
    hashes = {
        n: xxhash.xxh3_128((folder / n).read_bytes()).hexdigest() for n in ("a.safetensors", "b.safetensors")
    }
    assert found.files == hashes
    text = f"a.safetensors 100000 {hashes['a.safetensors']}\nb.safetensors 10 {hashes['b.safetensors']}\n"
    assert found.hash == xxhash.xxh3_128(text.encode()).hexdigest()


def test_any_byte_changes_it(folder: Path) -> None:
    before = weights_fingerprint(folder)
    data = bytearray((folder / "a.safetensors").read_bytes())
    data[77_777] ^= 1
    (folder / "a.safetensors").write_bytes(data)
    assert weights_fingerprint(folder).hash != before.hash


def test_unchanged_files_are_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "weights.json"
    read: list[str] = []
    honest = module.file_hash
    monkeypatch.setattr(module, "file_hash", lambda p: (read.append(p.name), honest(p))[1])
    first = weights_fingerprint(folder, cache)
    assert weights_fingerprint(folder, cache) == first
    assert sorted(read) == ["a.safetensors", "b.safetensors"]
    data = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(b"c" + data[1:])
    changed = weights_fingerprint(folder, cache)
    assert read[2:] == ["b.safetensors"]
    assert changed.hash != first.hash
    assert changed == weights_fingerprint(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 99, "files": {}}', '{"format": 1, "files": 3}']
)
def test_a_damaged_cache_is_only_slower(folder: Path, tmp_path: Path, content: str) -> None:
    cache = tmp_path / "weights.json"
    cache.write_text(content)
    assert weights_fingerprint(folder, cache) == weights_fingerprint(folder)


def test_which_files(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no safetensors") as nothing:
        weight_files(tmp_path)
    assert "target.model" in str(nothing.value.hint)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(TargetError, match="pickles"):
        weight_files(tmp_path)
    for name in ("model-1.safetensors", "model-2.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-2.safetensors", "y": "model-1.safetensors"}}))
    assert [p.name for p in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(TargetError, match="1 of 2 weight files are missing"):
        weight_files(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../model-1.safetensors"}}))
    with pytest.raises(TargetError, match="outside"):
        weight_files(tmp_path)
