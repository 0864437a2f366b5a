from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import CaptureInvalid, FormatTooNew, SegmentDamaged
from eyas.store import segment, segment_header
from eyas.store.commit import write_segment
from eyas.store.samples import last_rows, sample_id
from eyas.store.segment import CapturedSample, SegmentReader, encode_segment, verify_segment
from eyas.store.segment_header import read_header, segment_name, segment_number
from eyas.store.tensors import StoredTensor, to_float32
from tests.store.making import captured, same


def write(folder: Path, samples: list[CapturedSample], number: int = 1) -> Path:
    segment = encode_segment(samples, "recipe-hash")
    path = folder / segment_name(number, segment.checksum)
    write_segment(path, segment)
    assert path.stat().st_size == segment.num_bytes
    return path


@st.composite
def sample_lists(draw: st.DrawFn) -> list[CapturedSample]:
    num_layers = draw(st.integers(1, 4))
    width = draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(["BF16", "F16", "F32", "F64"]))
    samples = []
    for seed in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 20))
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        spans = tuple(zip(edges[::2], edges[1::2], strict=False))
        samples.append(captured(seed, length, spans, num_layers, width, dtype))
    return list({sample.id: sample for sample in samples}.values())


@settings(deadline=None, max_examples=60)
@given(samples=sample_lists())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, samples: list[CapturedSample]) -> None:
    path = write(tmp_path_factory.mktemp("segment"), samples)
    reader = SegmentReader(path)
    assert reader.ids == tuple(sample.id for sample in samples)
    assert reader.header.recipe == "recipe-hash"
    for sample in samples:
        assert same(sample, reader.sample(sample.id, check=True))
    assert reader.verify() == {}

    for name, tensor in safetensors.torch.load_file(path).items():
        sample = next(sample for sample in samples if name.startswith(sample.id))
        expected = sample.tensors()[name]
        assert tuple(tensor.shape) == expected.shape
        assert bytes(expected.raw()) == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_other_readers_see_equal_tensors(tmp_path: Path) -> None:
    samples = [captured(seed, dtype="F32") for seed in range(3)]
    path = write(tmp_path, samples)
    loaded = safetensors.numpy.load_file(path)
    assert len(loaded) == 12
    for sample in samples:
        assert np.array_equal(loaded[f"{sample.id}/aux"], sample.aux.array)
        assert np.array_equal(loaded[f"{sample.id}/last"], sample.last.array)
        assert loaded[f"{sample.id}/tokens"].tolist() == sample.tokens.tolist()
        assert loaded[f"{sample.id}/spans"].tolist() == [list(span) for span in sample.spans]
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "eyas-segment"
    assert metadata["recipe"] == "recipe-hash"
    assert set(json.loads(metadata["checksums"])) == set(loaded)


def test_bfloat16_bits_and_values(tmp_path: Path) -> None:
    values = torch.randn(5, 2, 4).to(torch.bfloat16)
    tensor = StoredTensor("BF16", values.view(torch.uint16).numpy())
    assert np.array_equal(to_float32(tensor), values.float().numpy())
    base = captured(0, 5, ((1, 5),), 2, 4)
    path = write(tmp_path, [CapturedSample(base.id, base.tokens, base.spans, tensor, base.last)])
    assert torch.equal(safetensors.torch.load_file(path)[f"{base.id}/aux"], values)


def test_alignment(tmp_path: Path) -> None:
    samples = [captured(seed, 5 + seed, ((1, 4 + seed),)) for seed in range(4)]
    header = read_header(write(tmp_path, samples))
    assert header.data_start % 64 == 0
    for name, entry in header.tensors.items():
        assert entry.start % (8 if name.endswith(("aux", "last")) else 4) == 0
    odd = read_header(write(tmp_path, [captured(9, 3, ((1, 3),), 1, 1)], number=2))
    assert all(entry.start % 2 == 0 for entry in odd.tensors.values())
    assert all(entry.start % 4 == 0 for entry in odd.tensors.values() if entry.dtype == "I32")


def test_reading_does_not_copy(tmp_path: Path) -> None:
    sample = captured(1)
    reader = SegmentReader(write(tmp_path, [sample]))
    first, second = reader.sample(sample.id), reader.sample(sample.id)
    assert first.aux.array.dtype == np.uint16
    for one, other in ((first.aux, second.aux), (first.last, second.last)):
        assert np.shares_memory(one.array, other.array)
        assert not one.array.flags.owndata
        assert not one.array.flags.writeable
    with pytest.raises(KeyError):
        reader.sample("0" * 32)


def test_views_outlive_the_reader(tmp_path: Path) -> None:
    sample = captured(1)
    view = SegmentReader(write(tmp_path, [sample])).sample(sample.id)
    assert same(sample, view)


def broken_copies(content: bytes) -> dict[str, bytes]:
    half = len(content) // 2
    return {
        "empty": b"",
        "seven bytes": content[:7],
        "half": content[:half],
        "one byte short": content[:-1],
        "one byte more": content + b"\0",
        "a block more": content + bytes(4096),
        "zeros": bytes(len(content)),
        "hole at the start": bytes(64) + content[64:],
        "hole in the data": content[:-40] + bytes(24) + content[-16:],
        "huge header": b"\xff" * 8 + content[8:],
    }


@pytest.mark.parametrize("kind", broken_copies(b"x" * 10_000))
def test_broken_files_are_found(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, [captured(seed) for seed in range(2)])
    path.write_bytes(broken_copies(path.read_bytes())[kind])
    if kind == "hole in the data":
        assert SegmentReader(path).verify()
    else:
        with pytest.raises(SegmentDamaged):
            read_header(path)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    samples = [captured(seed, 4, ((1, 4),), 1, 4) for seed in range(2)]
    path = write(tmp_path, samples)
    content = path.read_bytes()
    header = read_header(path)
    num_in_header = num_in_data = 0
    for position in range(len(content)):
        if 16 < position < header.data_start and position % 3:
            continue
        for bit in range(8) if position < 16 else [position % 8]:
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            if position < header.data_start:
                with pytest.raises(SegmentDamaged):
                    read_header(path)
                num_in_header += 1
                continue
            name = next(
                name
                for name, entry in header.tensors.items()
                if entry.start <= position - header.data_start < entry.end
            )
            faults = verify_segment(path, read_header(path))
            assert list(faults) == [name.split("/")[0]]
            with pytest.raises(SegmentDamaged, match="checksum"):
                SegmentReader(path).sample(name.split("/")[0], check=True)
            num_in_data += 1
    assert num_in_header > 400
    assert num_in_data == len(content) - header.data_start


def test_swapped_and_renamed_files_are_found(tmp_path: Path) -> None:
    first, second = write(tmp_path, [captured(1)], 1), write(tmp_path, [captured(2)], 2)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    with pytest.raises(SegmentDamaged, match="swapped"):
        read_header(first)
    second.rename(tmp_path / "seg-00000002-00000000.safetensors")
    with pytest.raises(SegmentDamaged, match="swapped or renamed"):
        read_header(tmp_path / "seg-00000002-00000000.safetensors")


def test_a_foreign_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "seg-00000001-01234567.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(4, np.float32)}, path)
    with pytest.raises(SegmentDamaged, match="eyas wrote"):
        read_header(path)


def test_identity_is_proven_from_the_segment_alone(tmp_path: Path) -> None:
    """Checksums hold, and still the sample is not what its id says."""
    sample, other = captured(1), captured(2)
    liar = CapturedSample(sample.id, other.tokens, sample.spans, sample.aux, sample.last)
    assert "id is not that of the tokens" in SegmentReader(write(tmp_path, [liar])).verify()[sample.id]
    short = StoredTensor("BF16", sample.last.array[:-1])
    liar = CapturedSample(sample.id, sample.tokens, sample.spans, sample.aux, short)
    assert "rows of last states" in SegmentReader(write(tmp_path, [liar], 2)).verify()[sample.id]


def test_a_newer_format_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_header, "SEGMENT_VERSION", 2)
    path = write(tmp_path, [captured(1)])
    monkeypatch.setattr(segment_header, "SEGMENT_VERSION", 1)
    with pytest.raises(FormatTooNew, match="version 2"):
        read_header(path)


def test_a_sample_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        encode_segment([captured(1), captured(1)], "r")


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_an_unreadable_place_costs_only_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Each 64 bytes of the data in turn cannot be read, whatever else is asked for in the same call."""
    path = write(tmp_path, [captured(seed) for seed in range(4)])
    header, real, faults = read_header(path), os.preadv, 0
    monkeypatch.setattr(segment, "_HASH_BYTES", chunk)
    assert verify_segment(path, header) == {}
    for bad in range(header.data_start, header.num_bytes, 64):
        hits = [0]

        def failing(
            descriptor: int, buffers: list[memoryview], at: int, bad: int = bad, hits: list[int] = hits
        ) -> int:
            if at < bad + 64 and bad < at + len(buffers[0]):
                hits[0] += 1
                raise OSError(errno.EIO, "Input/output error")
            return real(descriptor, buffers, at)

        monkeypatch.setattr(segment.os, "preadv", failing)
        found = verify_segment(path, header)
        monkeypatch.setattr(segment.os, "preadv", real)
        start, end = bad - header.data_start, bad - header.data_start + 64
        touched = {
            name.partition("/")[0]
            for name, entry in header.tensors.items()
            if entry.start < end and start < entry.end
        }
        assert found.keys() == touched
        assert all("Input/output error" in why for why in found.values())
        faults += hits[0] > 0
    print(f"{faults} unreadable places")
    assert faults == -(-(header.num_bytes - header.data_start) // 64)


def test_never_overwrites(tmp_path: Path) -> None:
    segment = encode_segment([captured(1)], "r")
    path = tmp_path / segment_name(1, segment.checksum)
    path.write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        write_segment(path, segment)
    assert path.read_bytes() == b"somebody's"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"id": "0" * 32}, "id"),
        ({"aux": StoredTensor("BF16", np.zeros((11, 2, 8), np.uint16))}, "aux"),
        ({"aux": StoredTensor("BF16", np.zeros((12, 16), np.uint16))}, "aux"),
        ({"last": StoredTensor("BF16", np.zeros((12, 8), np.uint16))}, "rows"),
        ({"last": StoredTensor("BF16", np.zeros((7, 9), np.uint16))}, "last"),
        ({"last": StoredTensor("I32", np.zeros((7, 8), np.int32))}, "I32"),
    ],
)
def test_samples_that_do_not_fit_together(change: dict[str, object], why: str) -> None:
    sample = captured(1)
    sample.check()
    with pytest.raises(CaptureInvalid) as caught:
        CapturedSample(**(sample.__dict__ | change)).check()  # type: ignore[arg-type]
    assert why in (caught.value.why or "")


def test_overlapping_spans_do_not_fit() -> None:
    tokens = np.arange(6, dtype=np.int32)
    spans = ((1, 4), (3, 6))
    sample = CapturedSample(
        sample_id(tokens, spans),
        tokens,
        spans,
        StoredTensor("F32", np.zeros((6, 1, 2), np.float32)),
        StoredTensor("F32", np.zeros((len(last_rows(spans, 6)), 2), np.float32)),
    )
    with pytest.raises(CaptureInvalid, match="span"):
        sample.check()


def test_names() -> None:
    assert segment_name(12, "abcdef0123") == "seg-00000012-abcdef01.safetensors"
    assert segment_number("seg-00000012-abcdef01.safetensors") == 12
    assert segment_number("seg-123456789-abcdef01.safetensors") == 123456789
    for name in ("seg-12-abcdef01.safetensors", ".seg-00000012-abcdef01.safetensors.7.tmp", "x.safetensors"):
        assert segment_number(name) is None


def test_unknown_and_wrong_dtypes() -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        StoredTensor("F8", np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="held as"):
        StoredTensor("BF16", np.zeros(1, np.float32))
