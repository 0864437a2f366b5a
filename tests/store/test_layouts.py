"""Older layouts: what a file holds is found by shape, holes are seen, files are whole or named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eyas.base.errors import DataError
from eyas.store.layouts.naming import LAYOUT_NAMES, LayoutName, file_content, file_name, find_files
from eyas.store.layouts.record import hole_in, mask_of_spans, older_sample, spans_of_mask
from eyas.store.layouts.tensor_file import FileTensor, read_tensor_file, write_tensor_file
from eyas.store.samples import last_rows
from eyas.store.tensors import StoredTensor
from tests.store.making import captured

T, A, H = 12, 2, 8
RNG = np.random.default_rng(5)
AUX = RNG.standard_normal((T, A, H)).astype("<f4")
LAST = RNG.standard_normal((T, H)).astype("<f4")
TOKENS = np.arange(T, dtype="<i8")
MASK = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1], dtype="<i8")


def tensor(array: np.ndarray, dtype: str = "F32") -> FileTensor:
    return FileTensor(dtype, array)


STATES = {
    "own": {"aux": tensor(AUX), "last": tensor(LAST)},
    "batch of one": {
        "aux_hidden_state": tensor(AUX.reshape(1, T, A * H)),
        "hidden_state": tensor(LAST[None]),
    },
    "layers and last in one": {"hidden_states": tensor(np.concatenate([AUX, LAST[:, None]], axis=1))},
    "flat in one": {"hidden_state": tensor(np.concatenate([AUX.reshape(T, -1), LAST], axis=1))},
    "a list of layers": {"hidden_states": [tensor(AUX[:, 0]), tensor(AUX[:, 1]), tensor(LAST)]},
    "aux and target": {"hidden_state": tensor(AUX.reshape(T, -1)), "target": tensor(LAST)},
}


@pytest.mark.parametrize("states", STATES.values(), ids=STATES.keys())
def test_states_are_told_by_shape(states: dict[str, FileTensor]) -> None:
    content = {"input_ids": tensor(TOKENS[None], "I64"), "loss_mask": tensor(MASK[None], "I64"), **states}
    found = older_sample(content, A, H)
    np.testing.assert_array_equal(found.aux.array, AUX)
    np.testing.assert_array_equal(found.last.array, LAST)
    np.testing.assert_array_equal(found.tokens, TOKENS)
    assert found.spans == ((3, 5), (7, 12))


def test_padding_behind_the_states_is_cut() -> None:
    padded = {"input_ids": tensor(np.arange(20), "I64"), "loss_mask": tensor(np.pad(MASK, (0, 8)), "I64")}
    found = older_sample({**padded, **STATES["own"]}, A, H)
    assert len(found.tokens) == T
    padded["loss_mask"] = tensor(np.ones(20, dtype="<i8"), "I64")
    with pytest.raises(ValueError, match="states are missing"):
        older_sample({**padded, **STATES["own"]}, A, H)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"last": None}, "cannot tell last states"),
        ({"aux": tensor(AUX[:, :1])}, "holds 1 layers"),
        ({"aux": tensor(AUX[:, :, :7])}, "does not divide"),
        ({"aux": tensor(AUX.astype("<i4"), "I32")}, "no dtype of states"),
        ({"last": tensor(LAST.astype("<f2"), "F16")}, "last states F16"),
        ({"input_ids": None}, "no token ids"),
        ({"input_ids": tensor(TOKENS[:-1], "I64")}, "12 rows of states for 11 tokens"),
        ({"input_ids": tensor(TOKENS.astype("<f4"))}, "not whole numbers"),
    ],
)
def test_what_cannot_be_is_said(change: dict[str, FileTensor | None], why: str) -> None:
    content = {"input_ids": tensor(TOKENS, "I64"), **STATES["own"], **change}
    with pytest.raises(ValueError, match=why):
        older_sample({name: value for name, value in content.items() if value is not None}, A, H)


def test_masks_and_spans() -> None:
    assert spans_of_mask(np.array([1, 1, 0, 0, 1])) == ((0, 2), (4, 5))
    assert spans_of_mask(np.zeros(3)) == ()
    assert mask_of_spans([(0, 2), (4, 5)], 6).tolist() == [1, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("width", [64, 4096])
def test_a_hole_of_a_page_is_seen_wherever_it_lies(width: int) -> None:
    whole = RNG.integers(1, 1 << 15, (64, 2, width), dtype="<u2")
    assert hole_in(StoredTensor("BF16", whole)) is None
    for start in range(0, whole.nbytes - 4096, 12_345):
        raw = bytearray(whole.tobytes())
        raw[start : start + 4096] = bytes(4096)
        holed = np.frombuffer(bytes(raw), dtype="<u2").reshape(whole.shape)
        assert hole_in(StoredTensor("BF16", holed)) is not None, start
    whole[3, 0] = 0
    assert hole_in(StoredTensor("BF16", whole), zero_slots=[0]) is None
    assert hole_in(StoredTensor("BF16", whole)) == "slot 0, row 3: all zero"


def test_tensor_files_are_what_the_library_reads_and_writes(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype="<f4").reshape(2, 3),
        "m": np.array([True, False]),
        "e": np.zeros((0, 2), "<i4"),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"k": "v"})
    read, metadata = read_tensor_file(tmp_path / "theirs.safetensors")
    assert metadata == {"k": "v"}
    assert all(np.array_equal(read[name].array, array) for name, array in tensors.items())
    write_tensor_file(tmp_path / "ours.safetensors", read, metadata)
    again = load_file(tmp_path / "ours.safetensors")
    assert all(np.array_equal(again[name], array) for name, array in tensors.items())


def test_every_truncation_of_a_tensor_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, STATES["own"], {})
    raw = path.read_bytes()
    for length in [*range(0, 200, 7), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(DataError):
            read_tensor_file(path)
    path.write_bytes(raw + b"x")
    with pytest.raises(DataError, match="damaged"):
        read_tensor_file(path)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_what_is_written_is_found_again(layout: LayoutName) -> None:
    sample = captured(3, length=T)
    found = older_sample(file_content(layout, sample), A, H)
    assert found.aux.raw() == sample.aux.raw()
    assert found.spans == sample.spans
    np.testing.assert_array_equal(found.tokens, sample.tokens)
    last = found.last.array
    if layout != "safetensors":
        rows = last_rows(sample.spans, T)
        assert not np.delete(last, rows, axis=0).any()
        last = last[rows]
    np.testing.assert_array_equal(last, sample.last.array)


def test_files_of_a_folder(tmp_path: Path) -> None:
    for number in (10, 9, 2000):
        path = tmp_path / file_name("rows", number, "x")
        path.parent.mkdir(exist_ok=True)
        path.touch()
    layout, files = find_files(tmp_path, "auto")
    assert layout == "rows"
    assert [str(path.relative_to(tmp_path)) for path in files] == [
        "rows_0-2000/data_9.ckpt",
        "rows_0-2000/data_10.ckpt",
        "rows_2000-4000/data_2000.ckpt",
    ]
    (tmp_path / "hs_1.safetensors").touch()
    with pytest.raises(DataError, match="several layouts"):
        find_files(tmp_path, "auto")
    assert find_files(tmp_path, "speculators")[0] == "speculators"
    with pytest.raises(DataError, match="no files"):
        find_files(tmp_path, "safetensors")
    with pytest.raises(DataError, match="no such folder"):
        find_files(tmp_path / "absent", "auto")
