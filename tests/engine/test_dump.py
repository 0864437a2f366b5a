"""A dump: any safetensors reader opens it, it says whose it is, its checksum finds a flipped bit."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from eyas_engine import dump
from eyas_engine.dump import Provenance, write_dump, write_error
from eyas_engine.settings import EngineSettings, check_name

PROVENANCE = Provenance(
    name="a7-1234abcd-x9",
    request_id="cmpl-1",
    engine="vllm 0.32.0",
    layers=(2, 15, 27),
    last="before-norm",
    server_started="1764460800.123",
)


def states(
    num_rows: int, width: int = 5, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    aux = torch.randn(num_rows, 3, width, generator=generator).to(dtype)
    return aux, torch.randn(num_rows, width, generator=generator).to(dtype)


def split(path: Path) -> tuple[dict[str, object], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_any_reader_opens_it(tmp_path: Path, num_rows: int, dtype: torch.dtype) -> None:
    aux, last = states(num_rows, dtype=dtype)
    path = write_dump(tmp_path, PROVENANCE, list(range(9, 9 + num_rows)), aux, last)
    assert [p.name for p in tmp_path.iterdir()] == ["a7-1234abcd-x9.dump"] == [path.name]
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"tokens", "aux", "last"}
        assert file.get_tensor("tokens").tolist() == list(range(9, 9 + num_rows))
        assert torch.equal(file.get_tensor("aux"), aux)
        assert torch.equal(file.get_tensor("last"), last)
        said = file.metadata()
    assert said["eyas_dump"] == "1"
    assert said["name"] == "a7-1234abcd-x9"
    assert said["engine"] == "vllm 0.32.0"
    assert json.loads(said["layers"]) == [2, 15, 27]
    assert said["last"] == "before-norm"
    assert said["server_started"] == "1764460800.123"
    assert said["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    header, data = split(path)
    assert said["checksum"] == f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"
    offsets = [header[key]["data_offsets"][0] for key in ("tokens", "aux", "last")]  # type: ignore[index]
    assert offsets[0] == 0
    assert all(offset % dtype.itemsize == 0 for offset in offsets)


def test_without_xxhash_the_standard_library_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_hasher", None)
    aux, last = states(11)
    path = write_dump(tmp_path, PROVENANCE, list(range(11)), aux, last)
    with safe_open(path, "pt") as file:
        said = file.metadata()["checksum"]
    assert said == f"blake2b_16:{hashlib.blake2b(split(path)[1], digest_size=16).hexdigest()}"


def test_states_that_are_slices_of_a_batch(tmp_path: Path) -> None:
    batch = torch.arange(40 * 4 * 6, dtype=torch.float32).reshape(40, 4, 6)
    rows = batch[3:20]
    path = write_dump(tmp_path, PROVENANCE, list(range(17)), rows[:, [0, 1, 2]], rows[:, 3])
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("aux"), batch[3:20, :3])
        assert torch.equal(file.get_tensor("last"), batch[3:20, 3])


def test_shapes_that_do_not_belong_together(tmp_path: Path) -> None:
    aux, last = states(7)
    for tokens, a, b in ((range(6), aux, last), (range(7), aux[:, :2], last), (range(7), aux, last[:5])):
        with pytest.raises(ValueError, match="shape"):
            write_dump(tmp_path, PROVENANCE, list(tokens), a, b)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump.os, "rename", refuse)
    aux, last = states(7)
    with pytest.raises(OSError, match="No space"):
        write_dump(tmp_path, PROVENANCE, list(range(7)), aux, last)
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_use_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a7-1234abcd-x9.tmp").write_bytes(b"another request is writing")
    aux, last = states(7)
    with pytest.raises(FileExistsError):
        write_dump(tmp_path, PROVENANCE, list(range(7)), aux, last)
    assert (tmp_path / "a7-1234abcd-x9.tmp").read_bytes() == b"another request is writing"


def test_an_error_file_says_why(tmp_path: Path) -> None:
    write_error(tmp_path, "a7-1234abcd-x9", "OSError: no space")
    assert [p.name for p in tmp_path.iterdir()] == ["a7-1234abcd-x9.err"]
    told = json.loads((tmp_path / "a7-1234abcd-x9.err").read_text())
    assert told == {"name": "a7-1234abcd-x9", "why": "OSError: no space"}


@pytest.mark.parametrize(
    "name",
    ["short", "../../etc/passwd-x", "Upper-case-name", "a" * 121, "with space in", "dot.dot.dot", None, 7],
)
def test_names_that_could_be_anything_else(name: object) -> None:
    assert str(check_name(name)).startswith("bad-name")


def test_names_that_are_names() -> None:
    assert check_name("a" * 120) is None
    assert check_name("a7-1234abcd-x9") is None


def test_settings_survive_a_table(tmp_path: Path) -> None:
    settings = EngineSettings(tmp_path, (2, 15), 30, "1.5", limit_bytes=7, full_share=0.5, num_threads=2)
    assert EngineSettings.from_table(json.loads(json.dumps(settings.as_table()))) == settings
