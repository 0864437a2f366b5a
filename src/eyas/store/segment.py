"""A segment: many captured samples in one safetensors file that proves its own content.

For each sample: ``ID/aux`` ``[T, A, H]``, ``ID/last`` ``[rows, H]``, ``ID/tokens`` I32 ``[T]`` and
``ID/spans`` I32 ``[S, 2]``. A segment alone proves identity: ID is `sample_id` of tokens and spans.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eyas.base.errors import CaptureInvalid
from eyas.store.samples import check_spans, last_rows, sample_id
from eyas.store.segment_header import SegmentHeader, TensorEntry, damaged, encode_header, read_header
from eyas.store.tensors import STATE_DTYPES, STORAGE_DTYPES, StoredTensor

__all__ = ["CapturedSample", "EncodedSegment", "SegmentReader", "encode_segment", "read_header"]

_READ_BYTES = 4 << 20
_HASH_BYTES = 512 << 10  # within a core's second-level cache: the hash then costs no memory traffic
_SMALL_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class CapturedSample:
    """A sample with its states.

    Args:
        id: identity by content.
        tokens: int32 ``[T]``.
        spans: half-open supervised token ranges.
        aux: aux states ``[T, A, H]``.
        last: last states ``[rows, H]`` after the final norm, for the rows of `last_rows`.
    """

    id: str
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    spans: tuple[tuple[int, int], ...]
    aux: StoredTensor
    last: StoredTensor

    @property
    def nbytes(self) -> int:
        return self.aux.nbytes + self.last.nbytes + int(self.tokens.nbytes) + 8 * len(self.spans)

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.spans)

    def check(self) -> None:
        """Raise CaptureInvalid unless identity, shapes and dtypes fit together."""
        length = len(self.tokens)
        reason = ""
        if self.id != sample_id(self.tokens, self.spans):
            reason = "the id is not that of the tokens and spans"
        elif self.aux.array.ndim != 3 or self.aux.shape[0] != length:
            reason = f"aux states are {self.aux.shape}, not [{length}, layers, width]"
        elif self.last.array.ndim != 2 or self.last.shape[1] != self.aux.shape[2]:
            reason = f"last states are {self.last.shape}, not [rows, {self.aux.shape[2]}]"
        elif self.last.shape[0] != (num_rows := len(last_rows(self.spans, length))):
            reason = f"{self.last.shape[0]} rows of last states for {num_rows} rows with a supervised token"
        elif not {self.aux.dtype, self.last.dtype} <= STATE_DTYPES:
            reason = f"states are {self.aux.dtype} and {self.last.dtype}"
        else:
            try:
                check_spans(self.spans, length)
            except ValueError as error:
                reason = str(error)
        if reason:
            raise CaptureInvalid("a captured sample does not fit together", where=self.id, why=reason)

    def tensors(self) -> dict[str, StoredTensor]:
        """The four tensors by their names in a segment."""
        spans = np.array(self.spans, dtype="<i4").reshape(-1, 2)
        return {
            f"{self.id}/aux": self.aux,
            f"{self.id}/last": self.last,
            f"{self.id}/tokens": StoredTensor("I32", np.asarray(self.tokens, dtype="<i4")),
            f"{self.id}/spans": StoredTensor("I32", spans),
        }


@dataclass(frozen=True)
class EncodedSegment:
    """The bytes of a segment, ready to be written one buffer after the other."""

    buffers: Sequence[bytes | memoryview] = field(repr=False)
    num_bytes: int
    checksum: str
    ids: tuple[str, ...]
    num_tokens: int


def encode_segment(samples: Sequence[CapturedSample], recipe_hash: str) -> EncodedSegment:
    """Lay out samples as one file; states are not copied, so they must not change until it is written.

    Raises:
        ValueError: a sample stands twice in ``samples``.
    """
    ids = tuple(sample.id for sample in samples)
    if len(set(ids)) != len(ids):
        raise ValueError("a sample stands twice in one segment")
    tensors = {name: tensor for sample in samples for name, tensor in sample.tensors().items()}
    entries: dict[str, TensorEntry] = {}
    data: list[memoryview] = []
    position = 0
    for name in _file_order(tensors):
        raw = tensors[name].raw()
        end = position + raw.nbytes
        checksum = xxhash.xxh3_128_hexdigest(raw)
        entries[name] = TensorEntry(tensors[name].dtype, tensors[name].shape, position, end, checksum)
        data.append(raw)
        position = end
    header, checksum = encode_header(entries, ids, recipe_hash)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    buffers = _join_small([header, *data])
    return EncodedSegment(buffers, len(header) + position, checksum, ids, num_tokens)


def _file_order(tensors: dict[str, StoredTensor]) -> list[str]:
    """An order without gaps that leaves every tensor at a multiple of its item size.

    States come first where that keeps all of them at multiples of 8; otherwise wider items do.
    """
    states_first = all(tensor.nbytes % 8 == 0 for tensor in tensors.values() if tensor.dtype in STATE_DTYPES)

    def rank(name: str) -> tuple[bool, int]:
        dtype = tensors[name].dtype
        return (states_first and dtype not in STATE_DTYPES, -STORAGE_DTYPES[dtype].itemsize)

    return sorted(tensors, key=rank)


def _join_small(buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same bytes with runs of small buffers joined: one write for thousands of token arrays."""
    joined: list[bytes | memoryview] = []
    small = bytearray()
    for buffer in buffers:
        if len(buffer) < _SMALL_BUFFER_BYTES:
            small += buffer
            if len(small) < _READ_BYTES:
                continue
        if small:
            joined.append(bytes(small))
            small = bytearray()
        if len(buffer) >= _SMALL_BUFFER_BYTES:
            joined.append(buffer)
    if small:
        joined.append(bytes(small))
    return joined


class SegmentReader:
    """A mapped segment; samples are views into the file, valid as long as they are referenced.

    Opening checks the header, the file's length and its name. Tensor checksums are checked by
    `verify`, or by ``sample(id, check=True)``.

    Raises:
        SegmentDamaged, FormatTooNew, FileNotFoundError: as `read_header`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != self.header.num_bytes:
                raise damaged(path, "it changed while it was opened")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def ids(self) -> tuple[str, ...]:
        return self.header.ids

    def _tensor(self, name: str, check: bool) -> StoredTensor:
        entry = self.header.tensors.get(name)
        if entry is None:
            raise damaged(self.path, f"tensor {name} is missing")
        dtype = STORAGE_DTYPES[entry.dtype]
        start = self.header.data_start + entry.start
        count = (entry.end - entry.start) // dtype.itemsize
        flat = np.frombuffer(self._map, dtype=dtype, count=count, offset=start if count else 0)
        if check and xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data) != entry.checksum:
            raise damaged(self.path, f"tensor {name} does not match its checksum")
        return StoredTensor(entry.dtype, flat.reshape(entry.shape))

    def sample(self, sample: str, *, check: bool = False) -> CapturedSample:
        """One sample as views; nothing is copied.

        Args:
            sample: its id.
            check: hash its tensors first.

        Raises:
            KeyError: the sample is not in this segment.
            SegmentDamaged: a tensor is missing, or does not match its checksum.
        """
        if f"{sample}/aux" not in self.header.tensors:
            raise KeyError(sample)
        spans = self._tensor(f"{sample}/spans", check).array
        return CapturedSample(
            id=sample,
            tokens=self._tensor(f"{sample}/tokens", check).array,
            spans=tuple((int(start), int(end)) for start, end in spans),
            aux=self._tensor(f"{sample}/aux", check),
            last=self._tensor(f"{sample}/last", check),
        )

    def verify(self, advance: Callable[[int], None] | None = None) -> dict[str, str]:
        """Faults by sample id, empty when whole: see `verify_segment`."""
        return verify_segment(self.path, self.header, advance)


def verify_segment(
    path: Path, header: SegmentHeader, advance: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Hash every tensor and prove every sample's identity; faults by sample id, empty when whole.

    Reads instead of mapping, so that a failing disk is a fault to name and not the end of the process.

    Args:
        advance: called with the number of bytes read since the last call.
    """
    faults: dict[str, str] = {}
    small: dict[str, bytes] = {}
    with open(path, "rb", buffering=0) as file:
        reader = _ChunkReader(file.fileno(), header.num_bytes)
        for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].start):
            sample, _, part = name.partition("/")
            try:
                digest, content = _hash_range(reader, header.data_start, entry, part in ("tokens", "spans"))
            except OSError as error:
                faults[sample] = f"{part}: {error}"
                continue
            if digest != entry.checksum:
                faults[sample] = f"{part} does not match its checksum"
            small[name] = content
            if advance is not None:
                advance(entry.end - entry.start)
    for sample in header.ids:
        if sample not in faults and (why := _identity_fault(sample, header, small)):
            faults[sample] = why
    return faults


class _ChunkReader:
    """Reads a file in chunks: many small tensors at once, hashed while a core's cache has them."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self._num_bytes = descriptor, num_bytes
        self._chunk = memoryview(bytearray(_HASH_BYTES))
        self._start = self._end = 0

    def at(self, position: int, wanted: int) -> memoryview:
        """Some of the ``wanted`` bytes from ``position`` on, at least one; valid until the next call.

        Raises:
            OSError: these bytes cannot be read, whatever may be wrong with those behind them.
        """
        if not self._start <= position < self._end:
            num_bytes = min(len(self._chunk), self._num_bytes - position)
            self._start = self._end = position
            try:
                num_read = os.preadv(self._descriptor, [self._chunk[:num_bytes]], position)
            except OSError:
                if num_bytes <= wanted:
                    raise
                num_read = os.preadv(self._descriptor, [self._chunk[:wanted]], position)
            if num_read == 0:
                raise OSError("the file ends early")
            self._end = position + num_read
        offset = position - self._start
        return self._chunk[offset : min(offset + wanted, self._end - self._start)]


def _hash_range(reader: _ChunkReader, data_start: int, entry: TensorEntry, keep: bool) -> tuple[str, bytes]:
    """The hash of a tensor's bytes, and the bytes themselves where they are to be kept."""
    digest = xxhash.xxh3_128()
    content = b""
    position, end = data_start + entry.start, data_start + entry.end
    while position < end:
        view = reader.at(position, end - position)
        digest.update(view)
        if keep:
            content += view
        position += len(view)
    return str(digest.hexdigest()), content


def _shape_only(entry: TensorEntry) -> StoredTensor:
    """A tensor of that shape which takes no memory, for checks that look at shapes alone."""
    return StoredTensor(entry.dtype, np.broadcast_to(np.zeros((), STORAGE_DTYPES[entry.dtype]), entry.shape))


def _identity_fault(sample: str, header: SegmentHeader, small: dict[str, bytes]) -> str:
    """Why a sample whose checksums hold is still not itself; empty when it is."""
    names = {part: f"{sample}/{part}" for part in ("aux", "last", "tokens", "spans")}
    missing = [part for part, name in names.items() if name not in header.tensors]
    if missing:
        return f"{missing[0]} is missing"
    spans = np.frombuffer(small[names["spans"]], dtype="<i4").reshape(-1, 2)
    try:
        CapturedSample(
            id=sample,
            tokens=np.frombuffer(small[names["tokens"]], dtype="<i4"),
            spans=tuple((int(start), int(end)) for start, end in spans),
            aux=_shape_only(header.tensors[names["aux"]]),
            last=_shape_only(header.tensors[names["last"]]),
        ).check()
    except CaptureInvalid as error:
        return error.why or error.what
    return ""
