"""Proof that captured states may be stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from eyas.base.errors import CaptureInvalid

_CHUNK_ELEMENTS = 1 << 18
_BITS: dict[torch.dtype, tuple[torch.dtype, Any, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.float64: (torch.int64, np.uint64, 0x7FF0000000000000),
}
"""For each dtype: integers of its width and the exponent, all ones exactly in infinities and NaNs."""


def check_capture(
    aux: torch.Tensor,
    last: torch.Tensor,
    *,
    num_tokens: int,
    num_last_rows: int,
    aux_layers: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    sample: str = "",
) -> None:
    """Raise unless one sample's states are whole, of the right kind, finite and alive.

    Args:
        aux: [num_tokens, len(aux_layers), hidden_size] on the CPU, contiguous.
        last: [num_last_rows, hidden_size] on the CPU, contiguous.
        aux_layers: names the slots of ``aux`` in messages; a row of zeros is allowed in layer 0,
            where a token's embedding may be zero.
        dtype: what both tensors must be stored as.
        sample: id that errors name.

    Raises:
        CaptureInvalid: the first fault found, with the layer and row.
    """
    _check_form("aux", aux, (num_tokens, len(aux_layers), hidden_size), dtype, sample)
    _check_form("last", last, (num_last_rows, hidden_size), dtype, sample)
    names = [f"layer {layer}" for layer in aux_layers]
    _check_content(aux, names, [layer == 0 for layer in aux_layers], sample)
    _check_content(last.unsqueeze(1), ["the last state"], [False], sample)


def _check_form(
    what: str, states: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, sample: str
) -> None:
    if states.dtype != dtype:
        raise _invalid("wrong_dtype", sample, f"{what} states are {states.dtype}, not {dtype}")
    if states.ndim != len(shape):
        why = f"{what} states have {states.ndim} dimensions, not {len(shape)}"
        raise _invalid("wrong_shape", sample, why)
    words = ("rows", "width") if len(shape) == 2 else ("rows", "layers", "width")
    for word, found, expected in zip(words, states.shape, shape, strict=True):
        if found != expected:
            why = f"{what} states: {word} {found}, expected {expected}"
            raise _invalid(f"wrong_{word}", sample, why)
    if states.device.type != "cpu" or not states.is_contiguous():
        raise _invalid("wrong_memory", sample, f"{what} states are not contiguous in main memory")


def _check_content(
    states: torch.Tensor, names: Sequence[str], zero_allowed: Sequence[bool], sample: str
) -> None:
    """Scan ``[rows, slots, width]`` once; chunks of rows stay in the processor's cache."""
    if states.numel() == 0:
        return
    signed, unsigned, exponent_bits = _BITS[states.dtype]
    bits = states.view(signed).numpy().view(unsigned)
    exponent, magnitude = unsigned(exponent_bits), unsigned(np.iinfo(unsigned).max >> 1)
    alive = np.zeros(len(names), dtype=bool)
    for start, chunk in _chunks(bits):
        exponents = chunk & exponent
        if exponents.max() == exponent:
            row, slot = np.argwhere(exponents == exponent)[0][:2]
            values = chunk[row, slot] & magnitude
            reason = "not_a_number" if (values > exponent).any() else "infinite"
            why = f"{names[slot]}, row {start + row}: not finite"
            raise _invalid(reason, sample, why)
        nonzero = ((chunk & magnitude) != 0).any(axis=2)
        alive |= nonzero.any(axis=0)
        for row, slot in np.argwhere((chunk[:, :, 1:] == chunk[:, :, :1]).all(axis=2)):
            # a whole layer of zeros is named as such below
            if nonzero[row, slot] or (alive[slot] and not zero_allowed[slot]):
                raise _invalid("constant", sample, f"{names[slot]}, row {start + row}: constant")
    for slot, name in enumerate(names):
        if not alive[slot]:
            raise _invalid("all_zero", sample, f"{name}: all zero")


def _chunks(bits: np.ndarray[Any, Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, bits.shape[1] * bits.shape[2]))
    for start in range(0, bits.shape[0], rows):
        yield start, bits[start : start + rows]


def _invalid(reason: str, sample: str, why: str) -> CaptureInvalid:
    return CaptureInvalid(
        "captured states are not fit to store", reason=reason, where=sample or None, why=why
    )
