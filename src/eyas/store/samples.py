"""Samples: token ids with spans, their identity, and the parquet parts they are kept in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from eyas.base.errors import DamageFound, DataError
from eyas.store.entry import SampleEntry

__all__ = [
    "SAMPLES_SCHEMA",
    "Sample",
    "SampleCounts",
    "SampleEntry",
    "iter_sample_index",
    "last_rows",
    "read_sample_index",
    "read_samples",
    "sample_id",
    "write_samples",
]

Spans = Sequence[tuple[int, int]]
Split = Literal["train", "validation"]

_MAX_PART_SAMPLES = 8192
_MAX_PART_TOKENS = 4_000_000  # 16 MB of token ids: a part is built in memory
_TEXT_COLUMNS = ("id", "conversation", "source", "domain", "split", "finish_reason", "origin")
_INDEX_COLUMNS = ["id", "length", "num_supervised", "split", "source"]
SAMPLES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.list_(pa.int32()))),
        ("length", pa.int32()),
        ("num_supervised", pa.int32()),
        *((name, pa.string()) for name in _TEXT_COLUMNS if name != "id"),
    ]
)


@dataclass(frozen=True)
class Sample:
    """What is trained on: the token ids of one rendered conversation and who wrote which of them.

    Args:
        id: `sample_id` of tokens and spans.
        tokens: int32 ``[T]``.
        spans: half-open token ranges written by the assistant; ascending, not overlapping, not empty.
        conversation: the conversation it was rendered from; train and validation never share one.
        source: name of the data source.
        domain: kind of prompt, for reports.
        split: ``train`` or ``validation``.
        finish_reason: how the answer ended: ``stop``, ``length``, or ``given`` with the data.
        origin: ``given`` with the data or ``regenerated`` by the target.
    """

    id: str
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    spans: tuple[tuple[int, int], ...]
    conversation: str
    source: str
    domain: str
    split: Split
    finish_reason: str
    origin: str

    @property
    def num_supervised(self) -> int:
        """Tokens inside spans."""
        return sum(end - start for start, end in self.spans)

    @property
    def entry(self) -> SampleEntry:
        return SampleEntry(self.id, len(self.tokens), self.num_supervised, self.split, self.source)


@dataclass(frozen=True)
class SampleCounts:
    """What `write_samples` wrote; duplicates are samples whose id was written before."""

    num_samples: int
    num_tokens: int
    num_supervised: int
    num_duplicates: int
    num_parts: int


def check_spans(spans: Spans, length: int) -> None:
    """Raise ValueError unless spans are ascending, disjoint, not empty and inside ``[0, length)``."""
    previous_end = 0
    for start, end in spans:
        if not previous_end <= start < end <= length:
            raise ValueError(f"span [{start}, {end}) does not fit after {previous_end} in {length} tokens")
        previous_end = end


def sample_id(tokens: Sequence[int] | np.ndarray[Any, Any], spans: Spans) -> str:
    """Identity of a sample by content: 32 hexadecimal digits.

    It is xxh3-128 over ``eyas-sample-1``, the number of tokens (int64), the tokens (int32), the
    number of spans (int64) and each span's start and end (int64), all little-endian.
    """
    token_array = np.asarray(tokens, dtype="<i4")
    span_array = np.asarray(spans, dtype="<i8").reshape(-1, 2)
    digest = xxhash.xxh3_128(b"eyas-sample-1")
    digest.update(np.int64(len(token_array)).astype("<i8").tobytes())
    digest.update(token_array.tobytes())
    digest.update(np.int64(len(span_array)).astype("<i8").tobytes())
    digest.update(span_array.tobytes())
    return str(digest.hexdigest())


def last_rows(spans: Spans, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows whose next token is supervised, ascending: the only ones whose last state is kept.

    Row r counts when r + 1 lies in a span and r >= 0. Returns int64 ``[rows]``.
    """
    next_is_supervised = np.zeros(length, dtype=bool)
    for start, end in spans:
        next_is_supervised[max(start - 1, 0) : max(min(end, length) - 1, 0)] = True
    return np.flatnonzero(next_is_supervised).astype(np.int64)


def write_samples(folder: Path, samples: Iterable[Sample]) -> SampleCounts:
    """Write samples as ``part-00000.parquet``, ...; memory is bounded by one part.

    The folder is meant to be sealed by the caller; only the seal makes the parts durable.

    Raises:
        DataError: a sample's spans are impossible or its id is not its content's.
        OSError: a part could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    part: list[Sample] = []
    part_tokens = num_samples = num_tokens = num_supervised = num_duplicates = num_parts = 0
    for sample in samples:
        _check_sample(sample)
        key = bytes.fromhex(sample.id)
        if key in seen:
            num_duplicates += 1
            continue
        seen.add(key)
        if part and (len(part) >= _MAX_PART_SAMPLES or part_tokens + len(sample.tokens) > _MAX_PART_TOKENS):
            _write_part(folder, num_parts, part)
            num_parts, part, part_tokens = num_parts + 1, [], 0
        part.append(sample)
        part_tokens += len(sample.tokens)
        num_samples += 1
        num_tokens += len(sample.tokens)
        num_supervised += sample.num_supervised
    if part or num_parts == 0:
        _write_part(folder, num_parts, part)
        num_parts += 1
    return SampleCounts(num_samples, num_tokens, num_supervised, num_duplicates, num_parts)


def _check_sample(sample: Sample) -> None:
    try:
        check_spans(sample.spans, len(sample.tokens))
    except ValueError as error:
        raise DataError("a sample has impossible spans", where=sample.conversation, why=str(error)) from error
    if sample.id != sample_id(sample.tokens, sample.spans):
        raise DataError("a sample's id is not that of its tokens and spans", where=sample.id)


def _write_part(folder: Path, number: int, samples: list[Sample]) -> None:
    token_offsets = np.cumsum([0, *(len(sample.tokens) for sample in samples)])
    span_offsets = np.cumsum([0, *(len(sample.spans) for sample in samples)])
    tokens = np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)])
    spans = np.array([edge for sample in samples for span in sample.spans for edge in span], dtype=np.int32)
    pairs = pa.ListArray.from_arrays(
        pa.array(np.arange(0, len(spans) + 1, 2, dtype=np.int32)), pa.array(spans)
    )
    columns: dict[str, Any] = {
        "tokens": pa.ListArray.from_arrays(
            pa.array(token_offsets, pa.int32()), pa.array(tokens.astype(np.int32))
        ),
        "spans": pa.ListArray.from_arrays(pa.array(span_offsets, pa.int32()), pairs),
        "length": pa.array([len(sample.tokens) for sample in samples], pa.int32()),
        "num_supervised": pa.array([sample.num_supervised for sample in samples], pa.int32()),
    }
    for name in _TEXT_COLUMNS:
        columns[name] = pa.array([getattr(sample, name) for sample in samples], pa.string())
    table = pa.table([columns[name] for name in SAMPLES_SCHEMA.names], schema=SAMPLES_SCHEMA)
    pq.write_table(
        table,
        folder / f"part-{number:05d}.parquet",
        compression="zstd",
        row_group_size=1024,
        write_page_checksum=True,
    )


def read_samples(folder: Path) -> Iterator[Sample]:
    """Samples in the order they were written, each checked against its id.

    Pages carry checksums; a part's footer, and whether a part is there at all, is for the seal of the
    folder to prove.

    Raises:
        DamageFound: a part is missing, cannot be read, or holds a sample that is not its id's.
    """
    for path in _parts(folder):
        for batch in _batches(path, SAMPLES_SCHEMA.names):
            yield from _samples_of(path, batch)


def _samples_of(path: Path, batch: Any) -> Iterator[Sample]:
    tokens, spans = batch.column("tokens"), batch.column("spans")
    token_offsets = tokens.offsets.to_numpy()
    token_values = tokens.values.to_numpy(zero_copy_only=False)
    span_lists = spans.to_pylist()
    texts = {name: batch.column(name).to_pylist() for name in _TEXT_COLUMNS}
    for row in range(batch.num_rows):
        # A copy: a view would keep the whole batch in memory for as long as one sample lives.
        row_tokens = token_values[token_offsets[row] : token_offsets[row + 1]].astype(np.int32, copy=True)
        row_spans = tuple((int(start), int(end)) for start, end in span_lists[row])
        if texts["id"][row] != sample_id(row_tokens, row_spans):
            raise DamageFound("a sample is not what its id says", where=path, why=f"id {texts['id'][row]}")
        yield Sample(tokens=row_tokens, spans=row_spans, **{name: texts[name][row] for name in _TEXT_COLUMNS})


def iter_sample_index(folder: Path) -> Iterator[SampleEntry]:
    """The entries of all samples without reading their tokens, one batch in memory at a time.

    Raises:
        DamageFound: a part is missing or cannot be read.
    """
    for path in _parts(folder):
        for batch in _batches(path, _INDEX_COLUMNS):
            columns = [batch.column(name).to_pylist() for name in _INDEX_COLUMNS]
            yield from map(SampleEntry._make, zip(*columns, strict=True))


def read_sample_index(folder: Path) -> list[SampleEntry]:
    """The entries of all samples as a list. Raises DamageFound as `iter_sample_index` does."""
    return list(iter_sample_index(folder))


def _parts(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("part-*.parquet"))
    if not paths:
        raise DamageFound("there are no samples here", where=folder, hint="eyas prepare")
    expected = [f"part-{number:05d}.parquet" for number in range(len(paths))]
    if [path.name for path in paths] != expected:
        missing = sorted(set(expected) - {path.name for path in paths})
        raise DamageFound("a part of the samples is missing", where=folder, why=", ".join(missing))
    return paths


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not file.schema_arrow.equals(SAMPLES_SCHEMA):
                raise OSError(f"columns are {file.schema_arrow.names}, not {SAMPLES_SCHEMA.names}")
            num_rows = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                num_rows += batch.num_rows
                yield batch
            if num_rows != file.metadata.num_rows:
                raise OSError(f"{num_rows} rows of {file.metadata.num_rows}")
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # as a damaged footer leads to
        raise DamageFound("samples cannot be read", where=path, why=str(error)) from error
