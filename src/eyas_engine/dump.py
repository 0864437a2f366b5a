"""The file of one dump: a safetensors file that says whose states it holds and how to check them.

Tensors: ``tokens`` [T] int64, ``aux`` [T, A, H], ``last`` [T, H]. The metadata's ``checksum`` covers
every byte after the header. A dump is not made durable: it lives until the client has stored it, and
after a crash it is captured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_hasher: Callable[[], Any] | None = None
with contextlib.suppress(ImportError):
    from xxhash import xxh3_128 as _hasher  # 20 times faster than any hash of the standard library

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}

DUMP_SUFFIX, ERROR_SUFFIX, UNFINISHED_SUFFIX = ".dump", ".err", ".tmp"


@dataclass(frozen=True)
class Provenance:
    """Who made a dump, and for whom.

    Args:
        name: what the client called it.
        request_id: what the engine calls the request.
        engine: name and version.
        layers: aux layers in the order of the columns, "after k decoder layers".
        last: ``before-norm`` or ``after-norm``.
        server_started: as in the folder's owner file.
    """

    name: str
    request_id: str
    engine: str
    layers: tuple[int, ...]
    last: str
    server_started: str

    def as_metadata(self) -> dict[str, str]:
        return {
            "eyas_dump": "1",
            "name": self.name,
            "request_id": self.request_id,
            "engine": self.engine,
            "layers": json.dumps(list(self.layers)),
            "last": self.last,
            "boot_id": boot_id(),
            "server_started": self.server_started,
        }


def boot_id() -> str:
    """An identity of this boot of the machine; ``unknown`` where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def write_dump(
    directory: Path, provenance: Provenance, tokens: Sequence[int], aux: torch.Tensor, last: torch.Tensor
) -> Path:
    """Write one dump under a temporary name and rename it into place.

    Args:
        directory: the server's dump folder.
        tokens: T token ids.
        aux: [T, A, H] on the CPU.
        last: [T, H] on the CPU.

    Raises:
        OSError: nothing of that name is left behind.
        ValueError: the shapes do not belong together.
    """
    num_rows, num_layers = len(tokens), len(provenance.layers)
    if aux.dim() != 3 or tuple(aux.shape[:2]) != (num_rows, num_layers):
        raise ValueError(f"aux states of shape {list(aux.shape)} for {num_rows} tokens, {num_layers} layers")
    if tuple(last.shape) != (num_rows, aux.shape[2]):
        raise ValueError(f"last states of shape {list(last.shape)} beside aux {list(aux.shape)}")
    tensors = {"tokens": torch.tensor(list(tokens), dtype=torch.int64), "aux": aux, "last": last}
    header, parts = encode(tensors, provenance.as_metadata())
    final = directory / (provenance.name + DUMP_SUFFIX)
    unfinished = directory / (provenance.name + UNFINISHED_SUFFIX)
    try:
        with open(unfinished, "xb") as file:
            file.write(header)
            for part in parts:
                file.write(part)
        os.rename(unfinished, final)
    except FileExistsError:
        raise  # another request has this name: its file is not ours to remove
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return final


def write_error(directory: Path, name: str, why: str) -> None:
    """Tell the client that its dump will not come. Raises OSError."""
    unfinished = directory / f"{name}-err{UNFINISHED_SUFFIX}"
    unfinished.write_text(json.dumps({"name": name, "why": why}), encoding="utf-8")
    os.rename(unfinished, directory / (name + ERROR_SUFFIX))


def encode(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[memoryview]]:
    """Header and data of a safetensors file, the checksum of the data in its metadata.

    The order of ``tensors`` is kept, so the widest numbers have to come first to be aligned.
    """
    described: dict[str, Any] = {}
    parts: list[memoryview] = []
    digest, kind = _new_hash()
    offset = 0
    for name, tensor in tensors.items():
        numbers: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        data = memoryview(numbers)
        described[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        offset += data.nbytes
        digest.update(data)
        parts.append(data)
    described["__metadata__"] = {**metadata, "checksum": f"{kind}:{digest.hexdigest()}"}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, parts


def _new_hash() -> tuple[Any, str]:
    if _hasher is not None:
        return _hasher(), "xxh3_128"
    return hashlib.blake2b(digest_size=16), "blake2b_16"
