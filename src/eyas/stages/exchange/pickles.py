"""Files of torch.save, read without ever running what a pickle asks for."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from eyas.base.errors import DataError
from eyas.base.files import write_atomic
from eyas.base.pickled import why_unreadable
from eyas.store.layouts.tensor_file import FileTensor

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ASKS_FOR_CODE = re.compile(r"(?:GLOBAL|Unsupported (?:global|class))[: ]+(?:GLOBAL )?([\w.]+)")
_CALLS = {
    "GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4",
}  # fmt: skip
"""Instructions of pickles that look something up or call it."""


class CodeRefused(DataError):
    """A pickle that asks for something to be called while it is read."""


def read_pickle(path: Path) -> dict[str, FileTensor | list[FileTensor]]:
    """Tensors, and lists of tensors, of a dictionary that torch.save wrote; other entries are left out.

    Raises:
        CodeRefused: reading it would run code; it was not run.
        DataError: it is truncated, changed, or no dictionary of tensors.
        OSError: it cannot be opened.
    """
    raw = path.read_bytes()
    if not raw:
        raise DataError("a file of states is damaged", where=path, why="it is empty")
    try:
        _check_archive(raw)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # what fails is said below
            loaded = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if asked := _asked_for(raw, str(error)):
            raise CodeRefused(
                "a pickle would run code and was not read", where=path, why=f"it asks for {asked}"
            ) from error
        raise _damaged(path, error) from error
    except (RuntimeError, ValueError, KeyError, EOFError, IndexError, TypeError, AttributeError,
            OSError, zipfile.BadZipFile) as error:  # fmt: skip
        raise _damaged(path, error) from error
    if not isinstance(loaded, dict):
        raise DataError(
            "a file of states is no dictionary", where=path, why=f"it is a {type(loaded).__name__}"
        )
    content: dict[str, FileTensor | list[FileTensor]] = {}
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            content[str(name)] = _from_torch(path, value)
        elif isinstance(value, list | tuple) and value and all(isinstance(v, torch.Tensor) for v in value):
            content[str(name)] = [_from_torch(path, layer) for layer in value]
    return content


def _asked_for(raw: bytes, error: str) -> str | None:
    """The code that torch did not let a pickle ask for; None when what it met is no pickle's."""
    if found := _ASKS_FOR_CODE.search(error):
        return found[1]
    # torch gives up at an instruction that it does not know, which may come before those that matter
    with suppress(ValueError, KeyError, IndexError, StopIteration, zipfile.BadZipFile):
        names = [instruction.name for instruction, _, _ in pickletools.genops(_instructions(raw))]
        return next((name for name in names if name in _CALLS), None)
    return None


def _instructions(raw: bytes) -> bytes:
    """The pickle in a file of torch.save, of either kind."""
    if not raw.startswith(b"PK"):
        return raw
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _check_archive(raw: bytes) -> None:
    """Compare every record with its CRC-32, which loading does not do."""
    if not raw.startswith(b"PK"):
        return  # the form of before torch 1.6 has no checksums
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"{name} does not match its CRC-32")


def _from_torch(path: Path, tensor: torch.Tensor) -> FileTensor:
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout != torch.strided:
        raise DataError(
            "a tensor has a dtype or layout that no states have", where=path, why=str(tensor.dtype)
        )
    plain = tensor.detach().contiguous()
    return FileTensor(name, (plain.view(torch.uint16) if name == "BF16" else plain).numpy())


def write_pickle(path: Path, content: Mapping[str, FileTensor | Sequence[FileTensor]]) -> None:
    """Write a dictionary of tensors as torch.save does, whole or not at all. Raises OSError."""
    tensors = {
        name: _to_torch(value) if isinstance(value, FileTensor) else [_to_torch(layer) for layer in value]
        for name, value in content.items()
    }
    file = io.BytesIO()
    torch.save(tensors, file)
    write_atomic(path, file.getvalue())


def _to_torch(tensor: FileTensor) -> torch.Tensor:
    plain = torch.from_numpy(tensor.array.copy())
    return plain.view(torch.bfloat16) if tensor.dtype == "BF16" else plain


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError("a file of states is damaged", where=path, why=why_unreadable(error))
