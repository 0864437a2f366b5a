from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eyas.base.errors import DamageFound, DataError
from eyas.base.seal import seal_faults, sealed_folder
from eyas.store import samples as module
from eyas.store.samples import (
    check_spans,
    last_rows,
    read_sample_index,
    read_samples,
    sample_id,
    write_samples,
)
from tests.store.making import captured, text_sample


def test_sample_id_is_the_documented_hash() -> None:
    tokens, spans = [5, 6, 7, 70000], [(1, 3), (3, 4)]
    content = b"eyas-sample-1" + struct.pack("<q4iq4q", 4, *tokens, 2, 1, 3, 3, 4)
    assert sample_id(tokens, spans) == xxhash.xxh3_128(content).hexdigest()
    assert len(sample_id([], [])) == 32


def test_sample_id_tells_tokens_from_spans() -> None:
    ids = {
        sample_id([1, 2, 3], [(0, 3)]),
        sample_id([1, 2, 3], [(1, 3)]),
        sample_id([1, 2, 3], [(0, 1), (1, 3)]),
        sample_id([1, 2], [(0, 2)]),
        sample_id([1, 2, 3], []),
    }
    assert len(ids) == 5
    array = np.array([1, 2, 3], dtype=np.int64)
    assert sample_id(array, ((0, 3),)) == sample_id([1, 2, 3], [(0, 3)])


@given(st.lists(st.booleans(), max_size=12))
def test_last_rows_by_enumeration(supervised: list[bool]) -> None:
    spans, start = [], None
    for position, inside in enumerate([*supervised, False]):
        if inside and start is None:
            start = position
        if not inside and start is not None:
            spans.append((start, position))
            start = None
    expected = [row for row in range(len(supervised)) if row + 1 < len(supervised) and supervised[row + 1]]
    rows = last_rows(spans, len(supervised))
    assert rows.tolist() == expected
    assert rows.dtype == np.int64


def test_last_rows_at_the_edges() -> None:
    assert last_rows([(0, 1)], 3).tolist() == []  # nothing predicts the first token
    assert last_rows([(0, 3)], 3).tolist() == [0, 1]
    assert last_rows([(2, 3)], 3).tolist() == [1]
    assert last_rows([(1, 2), (2, 3)], 3).tolist() == [0, 1]  # spans that touch


@pytest.mark.parametrize(
    "spans", [[(2, 2)], [(3, 2)], [(0, 9)], [(-1, 2)], [(2, 4), (3, 5)], [(4, 5), (0, 1)]]
)
def test_impossible_spans(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="span"):
        check_spans(spans, 8)


def test_round_trip_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PART_TOKENS", 60)
    splits = ("train", "validation", "validation")
    written = [
        text_sample(captured(seed, 10 + seed, ((1, 3), (5, 10))), splits[seed % 3]) for seed in range(10)
    ]
    written[4] = text_sample(captured(4, length=14, spans=()))
    counts = write_samples(tmp_path, [*written, written[2]])
    assert counts.num_duplicates == 1
    assert counts.num_samples == 10
    assert counts.num_tokens == sum(range(10, 20))
    assert counts.num_supervised == sum(sample.num_supervised for sample in written)
    assert counts.num_parts == len(list(tmp_path.glob("part-*.parquet"))) > 2

    read = list(read_samples(tmp_path))
    for before, after in zip(written, read, strict=True):
        assert after.tokens.dtype == np.int32
        assert np.array_equal(before.tokens, after.tokens)
        fields = set(before.__dict__) - {"tokens"}
        assert all(getattr(before, name) == getattr(after, name) for name in fields)
    assert read_sample_index(tmp_path) == [sample.entry for sample in written]


def test_any_parquet_reader_reads_the_parts(tmp_path: Path) -> None:
    sample = text_sample(captured(1))
    write_samples(tmp_path, [sample])
    (row,) = pq.read_table(tmp_path / "part-00000.parquet").to_pylist()
    assert row["tokens"] == sample.tokens.tolist()
    assert row["spans"] == [list(span) for span in sample.spans]
    assert row["length"] == 12
    assert row["num_supervised"] == 7


def test_no_samples_are_a_part_without_rows(tmp_path: Path) -> None:
    assert write_samples(tmp_path, []).num_samples == 0
    assert list(read_samples(tmp_path)) == []


def test_a_wrong_id_is_refused(tmp_path: Path) -> None:
    sample = text_sample(captured(1))
    with pytest.raises(DataError, match="id"):
        write_samples(tmp_path, [type(sample)(**(sample.__dict__ | {"id": "0" * 32}))])
    with pytest.raises(DataError, match="spans"):
        write_samples(tmp_path, [type(sample)(**(sample.__dict__ | {"spans": ((5, 99),)}))])


def test_every_flipped_bit_is_found_by_the_seal_and_most_by_reading(tmp_path: Path) -> None:
    written = [text_sample(captured(seed)) for seed in range(3)]
    folder = tmp_path / "samples"
    with sealed_folder(folder, {}) as unsealed:
        write_samples(unsealed, written)
    path = folder / "part-00000.parquet"
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    num_found = 0
    positions = range(0, len(content), 7)
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert seal_faults(folder)
        try:
            tokens = [sample.tokens.tolist() for sample in read_samples(folder)]
        except DamageFound:
            num_found += 1
            continue
        if position < footer:
            assert tokens == [sample.tokens.tolist() for sample in written]
    assert num_found > len(positions) / 3


def test_a_missing_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PART_SAMPLES", 2)
    write_samples(tmp_path, [text_sample(captured(seed)) for seed in range(6)])
    (tmp_path / "part-00001.parquet").unlink()
    with pytest.raises(DamageFound, match="part-00001"):
        read_sample_index(tmp_path)
