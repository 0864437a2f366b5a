"""Plain safetensors files of other tools: read with every check, written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.errors import DataError
from eyas.base.files import write_atomic
from eyas.store.tensors import STORAGE_DTYPES

Array = np.ndarray[Any, np.dtype[Any]]

FILE_DTYPES: dict[str, np.dtype[Any]] = {
    **STORAGE_DTYPES,
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""What samples of other tools hold: states, token ids and masks. BF16 stands as uint16."""

_MAX_HEADER_BYTES = 100_000_000


class FileTensor:
    """One tensor with the dtype name of its file; arrays of BF16 hold its bits.

    Attributes:
        dtype: a key of `FILE_DTYPES`.
    """

    def __init__(self, dtype: str, array: Array) -> None:
        self.dtype = dtype
        self.array = array


def read_tensor_file(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; its length has to be exactly what its header says.

    Raises:
        DataError: it is truncated or no such file.
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or not 2 <= length <= min(len(raw) - 8, _MAX_HEADER_BYTES):
        raise _damaged(path, f"its header cannot be {length} bytes of a {len(raw)} byte file")
    try:
        fields = json.loads(raw[8 : 8 + length])
        metadata = {str(k): str(v) for k, v in fields.pop("__metadata__", {}).items()}
        tensors, end = {}, 0
        for name, entry in fields.items():
            dtype, shape = FILE_DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
            start, stop = entry["data_offsets"]
            count = math.prod(shape)
            if start < 0 or stop - start != count * dtype.itemsize or 8 + length + stop > len(raw):
                raise _damaged(path, f"tensor {name} does not lie within its {len(raw)} bytes: truncated")
            array = np.frombuffer(raw, dtype=dtype, count=count, offset=8 + length + start if count else 0)
            tensors[name] = FileTensor(entry["dtype"], array.reshape(shape))
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read ({type(error).__name__}: {error})") from error
    if 8 + length + end != len(raw):
        raise _damaged(path, f"{len(raw)} bytes long, its header says {8 + length + end}")
    return tensors, metadata


def write_tensor_file(path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically. Raises OSError."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, position = [], 0
    # wider items first, so that every tensor lies at a multiple of its item size
    for name in sorted(tensors, key=lambda key: -FILE_DTYPES[tensors[key].dtype].itemsize):
        tensor = tensors[name]
        raw = np.ascontiguousarray(tensor.array).tobytes()
        fields[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.array.shape),
            "data_offsets": [position, position + len(raw)],
        }
        parts.append(raw)
        position += len(raw)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    write_atomic(path, b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def _damaged(path: Path, why: str) -> DataError:
    return DataError("a file of states is damaged", where=path, why=why)
