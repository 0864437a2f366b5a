"""The header of a segment: a safetensors header that carries checksums of the tensors and of itself.

Layout: 8 bytes of header length, JSON padded with spaces so that data starts at a multiple of 64,
then the tensors without a gap. ``__metadata__`` comes first and its first field is
``header_checksum``: xxh3-128 over the length and the whole header with that field's digits set to 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from eyas.base.errors import FormatTooNew, SegmentDamaged
from eyas.store.tensors import STORAGE_DTYPES

SEGMENT_FORMAT = "eyas-segment"
SEGMENT_VERSION = 1
CODEC = "plain"
DATA_ALIGNMENT = 64

_MAX_HEADER_BYTES = 100_000_000  # what readers of safetensors accept
_BLANK = b"0" * 32
_OPENING = b'{"__metadata__":{"header_checksum":"'
_KNOWN_FORMAT = f'","format":"{SEGMENT_FORMAT}","version":"{SEGMENT_VERSION}","recipe":"'.encode()


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a segment; ``start`` and ``end`` count bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str


@dataclass(frozen=True)
class SegmentHeader:
    """A segment's header after it was checked against its own checksum.

    Args:
        recipe: hash of the recipe the states were captured with.
        checksum: the header's own; it covers every tensor's checksum, so it names the content.
        data_start: where tensors begin, in bytes from the start of the file.
        num_bytes: how long the whole file must be.
        tensors: by name, in file order.
        ids: samples in the order they were added.
    """

    recipe: str
    checksum: str
    data_start: int
    num_bytes: int
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    ids: tuple[str, ...] = field(repr=False)


def segment_name(number: int, checksum: str) -> str:
    """The file name of a segment: its number and the first 8 digits of its header checksum."""
    return f"seg-{number:08d}-{checksum[:8]}.safetensors"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name; None for any other name."""
    parts = name.removesuffix(".safetensors").split("-")
    if not name.endswith(".safetensors") or len(parts) != 3 or parts[0] != "seg":
        return None
    if not (len(parts[1]) >= 8 and parts[1].isascii() and parts[1].isdigit() and len(parts[2]) == 8):
        return None
    return int(parts[1])


def encode_header(tensors: Mapping[str, TensorEntry], ids: Sequence[str], recipe: str) -> tuple[bytes, str]:
    """The header's bytes, length included, and its checksum."""
    metadata = {
        "header_checksum": _BLANK.decode(),
        "format": SEGMENT_FORMAT,
        "version": str(SEGMENT_VERSION),
        "recipe": recipe,
        "codec": CODEC,
        "samples": json.dumps(list(ids), separators=(",", ":")),
        "checksums": json.dumps(
            {name: entry.checksum for name, entry in tensors.items()}, separators=(",", ":")
        ),
    }
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, entry in tensors.items():
        fields[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    blank = len(text).to_bytes(8, "little") + text
    checksum = xxhash.xxh3_128_hexdigest(blank)
    digits = 8 + len(_OPENING)
    return blank[:digits] + checksum.encode() + blank[digits + 32 :], checksum


def read_recipe(path: Path, num_bytes: int) -> str | None:
    """The recipe in a segment's header, where the header is whole and fits the file's name and length.

    Takes no tensor apart, so it costs one read and one hash; None means: ask `read_header` what is wrong.

    Args:
        num_bytes: how long the file must be.
    """
    digits = 8 + len(_OPENING)
    try:
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                return None
            length = 8 + int.from_bytes(file.read(8), "little")
            if length > min(num_bytes, _MAX_HEADER_BYTES):
                return None
            header = bytearray(length)
            file.seek(0)
            if file.readinto(header) != length:
                return None
    except OSError:
        return None
    hashed = xxhash.xxh3_128(memoryview(header)[:digits])
    hashed.update(_BLANK)
    hashed.update(memoryview(header)[digits + 32 :])
    checksum = hashed.hexdigest()
    if header[8 : digits + 32] != _OPENING + checksum.encode():
        return None
    recipe = digits + 32 + len(_KNOWN_FORMAT)
    known = header.startswith(_KNOWN_FORMAT, digits + 32)
    if not known or path.name != segment_name(segment_number(path.name) or 0, checksum):
        return None
    return header[recipe : header.find(b'"', recipe)].decode("ascii", "replace")


def read_header(path: Path) -> SegmentHeader:
    """Read and check a segment's header, its file length and the digits in its name.

    Raises:
        SegmentDamaged: the file is no segment, or its header, length or name is not what was written.
        FormatTooNew: a newer eyas wrote it.
        FileNotFoundError: there is no such file.
    """
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length_bytes = file.read(8)
            length = int.from_bytes(length_bytes, "little")
            if len(length_bytes) < 8 or not 2 <= length <= min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise damaged(path, f"the header cannot be {length} bytes of a {num_bytes} byte file")
            text = file.read(length)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise damaged(path, str(error)) from error
    return _decode(path, length_bytes + text, num_bytes)


def _decode(path: Path, header: bytes, num_bytes: int) -> SegmentHeader:
    digits = 8 + len(_OPENING)
    if header[8:digits] != _OPENING:
        raise damaged(path, "the header does not begin as one that eyas wrote")
    checksum = header[digits : digits + 32].decode("ascii", "replace")
    if checksum != xxhash.xxh3_128_hexdigest(header[:digits] + _BLANK + header[digits + 32 :]):
        raise damaged(path, "the header does not match its own checksum")
    # From here on the header is what was written; what can be wrong is who wrote it and what follows it.
    fields = json.loads(header[8:])
    metadata = fields.pop("__metadata__")
    if metadata.get("format") != SEGMENT_FORMAT:
        raise damaged(path, f"its format is {metadata.get('format')!r}, not {SEGMENT_FORMAT!r}")
    if int(metadata["version"]) > SEGMENT_VERSION or metadata["codec"] != CODEC:
        raise FormatTooNew(
            f"a segment has format version {metadata['version']}, codec {metadata['codec']}",
            where=path,
            why=f"this eyas reads up to version {SEGMENT_VERSION}, codec {CODEC}",
            hint="pip install --upgrade eyas",
        )
    if path.name != segment_name(segment_number(path.name) or 0, checksum):
        raise damaged(path, f"its content is that of a segment ending in -{checksum[:8]}: swapped or renamed")
    checksums = json.loads(metadata["checksums"])
    tensors = {
        name: TensorEntry(
            entry["dtype"],
            tuple(entry["shape"]),
            entry["data_offsets"][0],
            entry["data_offsets"][1],
            checksums[name],
        )
        for name, entry in fields.items()
    }
    _check_offsets(path, tensors)
    end = len(header) + max((entry.end for entry in tensors.values()), default=0)
    if end != num_bytes:
        raise damaged(path, f"{num_bytes:,} bytes long, written with {end:,}")
    ids = tuple(json.loads(metadata["samples"]))
    return SegmentHeader(metadata["recipe"], checksum, len(header), end, tensors, ids)


def _check_offsets(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        itemsize = STORAGE_DTYPES[entry.dtype].itemsize
        num_bytes = itemsize
        for size in entry.shape:
            num_bytes *= size
        if entry.start != position or entry.end - entry.start != num_bytes:
            raise damaged(path, f"tensor {name} does not lie where its shape says")
        position = entry.end


def damaged(path: Path, why: str) -> SegmentDamaged:
    """The error for a damaged segment, with the command that mends it."""
    return SegmentDamaged("a segment is damaged", where=path, why=why, hint="eyas run")
