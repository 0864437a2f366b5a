"""Reading a dump: a safetensors file from another process, believed only after every check.

Legend: T tokens, A aux layers, H width.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from eyas.targets.server.faults import ServerFault

PROTOCOL = 1
SUFFIX, ERROR_SUFFIX, UNFINISHED_SUFFIX = ".dump", ".err", ".tmp"
_HEADER_LIMIT = 1 << 20
_CLOCK_SLACK_SECONDS = 2.0
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHECKSUMS: dict[str, Callable[[Any], str]] = {
    "xxh3_128": lambda data: str(xxhash.xxh3_128_hexdigest(data)),
    "blake2b_16": lambda data: hashlib.blake2b(data, digest_size=16).hexdigest(),
}


@dataclass(frozen=True)
class Expected:
    """What a dump has to be.

    Args:
        name: that was asked for.
        tokens: of the prompt.
        layers: in the "after k decoder layers" sense, in the order of the slots.
        hidden_size: H.
        dtype: the target's arithmetic.
        sent_at: unix seconds when the request went out.
    """

    name: str
    tokens: Sequence[int]
    layers: Sequence[int]
    hidden_size: int
    dtype: torch.dtype
    sent_at: float


@dataclass(frozen=True)
class Dump:
    """A dump whose identity and form are right; what its numbers are is checked elsewhere.

    Attributes:
        aux: [T, A, H].
        last: [T, H].
        before_norm: ``last`` is from before the final norm.
        engine: name and version, as the server says.
        instance: boot and start of the server that wrote it.
    """

    aux: torch.Tensor
    last: torch.Tensor
    before_norm: bool
    engine: str
    instance: str


def read_dump(path: Path, expected: Expected, kind_of_name: Callable[[str], str]) -> Dump:
    """Read a dump and check whose it is and what form it has, in the order in which faults hide each other.

    Args:
        kind_of_name: the fault's code when the dump carries another name (see `DumpNames.kind`).

    Raises:
        ServerFault: with a code of its own for each fault.
        FileNotFoundError: there is no file.
    """
    header, data, modified = _read(path)
    about = _metadata(header)
    _check_checksum(about, data)
    if about.get("eyas_dump") != str(PROTOCOL):
        raise ServerFault("damaged", f"its format is {about.get('eyas_dump')!r}, not {PROTOCOL}")
    name = about.get("name", "")
    if name != expected.name:
        raise ServerFault(kind_of_name(name), f"it carries the name {name!r}")
    if modified < expected.sent_at - _CLOCK_SLACK_SECONDS:
        age = expected.sent_at - modified
        raise ServerFault("stale", f"it is {age:.0f} s older than the request")
    aux, last, tokens = (_tensor(header, data, key) for key in ("aux", "last", "tokens"))
    _check_tokens(tokens.tolist(), expected.tokens, len(aux), len(last))
    _check_form(about, aux, last, expected)
    return Dump(
        aux=aux,
        last=last,
        before_norm=_before_norm(about),
        engine=about.get("engine", "unknown"),
        instance=f"{about.get('boot_id', '')} {about.get('server_started', '')}",
    )


def _read(path: Path) -> tuple[dict[str, Any], memoryview, float]:
    """Header, data behind it, and time of the last change. The file is copied: dumps are removed later."""
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        start = file.read(8)
        if len(start) < 8:
            raise ServerFault("torn", f"{status.st_size} bytes long")
        (length,) = struct.unpack("<Q", start)
        if not 2 <= length <= _HEADER_LIMIT:
            raise ServerFault("damaged", f"its header claims {length} bytes")
        text = file.read(length)
        if len(text) < length:
            raise ServerFault("torn", f"{status.st_size} bytes long, its header alone has {length}")
        try:
            header = json.loads(text)
            ends = [int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"]
            num_bytes = max(ends)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ServerFault("damaged", f"its header cannot be read: {error}") from error
        found = status.st_size - 8 - length
        if found != num_bytes:
            code = "torn" if found < num_bytes else "damaged"
            raise ServerFault(code, f"{found} bytes of states, its header says {num_bytes}")
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            count = file.readinto(view[at:])
            if not count:
                raise ServerFault("torn", f"{at} of {num_bytes} bytes could be read")
            at += count
    return header, view, status.st_mtime


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    about = header.get("__metadata__")
    if not isinstance(about, dict):
        raise ServerFault("damaged", "it has no metadata")
    return {str(key): str(value) for key, value in about.items()}


def _check_checksum(about: dict[str, str], data: memoryview) -> None:
    kind, _, digest = about.get("checksum", "").partition(":")
    if kind not in _CHECKSUMS:
        raise ServerFault("damaged", f"it has no checksum that is known ({kind!r})")
    if _CHECKSUMS[kind](data) != digest.lower():
        raise ServerFault("damaged", "its checksum does not match")


def _tensor(header: dict[str, Any], data: memoryview, key: str) -> torch.Tensor:
    """A tensor over the data, without a copy where it is aligned."""
    try:
        entry = header[key]
        start, end = (int(place) for place in entry["data_offsets"])
        shape = [int(size) for size in entry["shape"]]
        dtype = torch.int64 if key == "tokens" and entry["dtype"] == "I64" else _DTYPES.get(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise ServerFault("damaged", f"it has no {key} that can be read") from error
    if dtype is None:
        raise ServerFault("wrong_dtype", f"{key} is {entry['dtype']}")
    count = 1
    for size in shape:
        count *= size
    if min(shape, default=0) < 0 or not 0 <= start <= end <= len(data):
        raise ServerFault("damaged", f"{key} lies outside the file")
    if end - start != count * dtype.itemsize:
        raise ServerFault("damaged", f"{key} of shape {shape} has {end - start} bytes")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    part = data[start:end]
    if start % dtype.itemsize:
        part = memoryview(bytearray(part))
    return torch.frombuffer(part, dtype=dtype).reshape(shape)


def _check_tokens(found: Sequence[int], expected: Sequence[int], num_aux: int, num_last: int) -> None:
    wanted = [int(token) for token in expected]
    found = list(found)
    rows = min(num_aux, num_last)
    short = len(found) < len(wanted) and (not found or found in (wanted[-len(found) :], wanted[: len(found)]))
    if short or (found == wanted and rows < len(wanted)):
        raise ServerFault("rows", f"{min(len(found), rows)} rows for {len(wanted)} tokens")
    if found != wanted:
        raise ServerFault("other_tokens", f"{len(found)} tokens that are not the {len(wanted)} sent")
    if num_aux != len(wanted) or num_last != len(wanted):
        raise ServerFault("rows", f"{num_aux} and {num_last} rows for {len(wanted)} tokens")


def _check_form(about: dict[str, str], aux: torch.Tensor, last: torch.Tensor, expected: Expected) -> None:
    layers: object = None
    with contextlib.suppress(ValueError):
        layers = json.loads(about.get("layers", ""))
    if layers != list(expected.layers):
        raise ServerFault("wrong_layers", f"it holds layers {layers}, asked for {list(expected.layers)}")
    if aux.ndim != 3 or aux.shape[1] != len(expected.layers):
        raise ServerFault("wrong_layers", f"aux states of shape {list(aux.shape)}")
    if last.ndim != 2 or {aux.shape[2], last.shape[1]} != {expected.hidden_size}:
        widths = f"{aux.shape[2]} and {last.shape[-1]}"
        raise ServerFault("wrong_width", f"states {widths} wide, the target has {expected.hidden_size}")
    if {aux.dtype, last.dtype} != {expected.dtype}:
        raise ServerFault("wrong_dtype", f"states are {aux.dtype} and {last.dtype}, not {expected.dtype}")


def _before_norm(about: dict[str, str]) -> bool:
    kinds = {"before-norm": True, "after-norm": False}
    if about.get("last") not in kinds:
        raise ServerFault("damaged", f"it does not say which last state it holds ({about.get('last')!r})")
    return kinds[about["last"]]
