"""Tensors as they lie in a file: a safetensors dtype name and the bytes, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

STORAGE_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""The numpy dtype that holds each safetensors dtype; numpy has no bfloat16, so its bits stand as uint16."""

STATE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes that captured states may have."""


@dataclass(frozen=True)
class StoredTensor:
    """An array together with the safetensors dtype that its bytes stand for.

    Args:
        dtype: a key of `STORAGE_DTYPES`.
        array: held in the numpy dtype of that name; BF16 as uint16.

    Raises:
        ValueError: the dtype is unknown or the array is held in another one.
    """

    dtype: str
    array: np.ndarray[Any, np.dtype[Any]]

    def __post_init__(self) -> None:
        expected = STORAGE_DTYPES.get(self.dtype)
        if expected is None:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(STORAGE_DTYPES)}")
        if self.array.dtype != expected:
            raise ValueError(f"{self.dtype} is held as {expected}, got {self.array.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def raw(self) -> memoryview:
        """The bytes, row-major and little-endian; a view wherever the array is contiguous."""
        flat = np.ascontiguousarray(self.array).reshape(-1)
        return flat.view(np.uint8).data.toreadonly()


def to_float32(tensor: StoredTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The values as float32; exact for BF16, F16 and F32. Copies unless the tensor is F32."""
    if tensor.dtype == "BF16":
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return tensor.array.astype(np.float32, copy=False)
