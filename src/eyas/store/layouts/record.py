"""What one file of an older layout holds, whatever its tool called it.

Names differ, shapes decide: of width H, a tensor of one slot is the last state, of A slots the aux states,
of A + 1 slots both, the last state last. A leading dimension of 1 is a batch of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.store.layouts.tensor_file import Array, FileTensor
from eyas.store.samples import check_spans
from eyas.store.tensors import STATE_DTYPES, StoredTensor

_TOKENS = ("tokens", "input_ids", "token_ids")
_AUX = ("aux", "aux_hidden_state", "aux_hidden_states", "aux_states")
_LAST = (
    "last",
    "last_hidden_state",
    "last_hidden_states",
    "verifier_last_hidden_states",
    "last_state",
    "target",
)
_EITHER = ("hidden_states", "hidden_state")

FileContent = Mapping[str, FileTensor | Sequence[FileTensor]]
"""Tensors, or lists of tensors of one layer each, by name."""

_BLOCK_BYTES = 1024  # a hole that a filesystem leaves is a page of 4096 bytes: it covers such a block


@dataclass(frozen=True)
class OlderSample:
    """One file's content.

    Args:
        tokens: int32 ``[T]``.
        spans: supervised ranges; None when the file does not say.
        aux: ``[T, A, H]``.
        last: ``[T, H]``, or ``[rows, H]`` where only rows with a supervised next token were kept.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    spans: tuple[tuple[int, int], ...] | None
    aux: StoredTensor
    last: StoredTensor


def older_sample(content: FileContent, num_aux: int, hidden_size: int) -> OlderSample:
    """Make sense of a file's tensors.

    Raises:
        ValueError: says which tensor is missing, doubled, or of an impossible shape or dtype.
    """
    tokens = _tokens(content)
    aux, last = _states(content, num_aux, hidden_size)
    length = aux.shape[0]
    if len(tokens) < length:
        raise ValueError(f"{length} rows of states for {len(tokens)} tokens")
    spans = _spans(content, length)
    if len(tokens) > length and any(edge > length for span in spans or () for edge in span):
        raise ValueError(f"{length} rows of states for {len(tokens)} tokens: states are missing")
    if last.shape[0] > length:
        raise ValueError(f"{last.shape[0]} rows of last states for {length} tokens")
    return OlderSample(tokens[:length], spans, aux, last)


def _tokens(content: FileContent) -> np.ndarray[Any, np.dtype[np.int32]]:
    array = _unbatched(_one(content, _TOKENS, "token ids").array, 1, "token ids")
    if array.dtype.kind not in "iu" or (array.size and (array.min() < 0 or array.max() >= 2**31)):
        raise ValueError("token ids are not whole numbers from 0 on")
    return np.ascontiguousarray(array, dtype="<i4")


def _one(content: FileContent, names: Sequence[str], what: str) -> FileTensor:
    for name in names:
        found = content.get(name)
        if isinstance(found, FileTensor):
            return found
    raise ValueError(f"no {what}: none of {', '.join(names)} among {', '.join(sorted(content)) or 'nothing'}")


def _unbatched(array: Array, num_dims: int, what: str) -> Array:
    while array.ndim > num_dims and array.shape[0] == 1:
        array = array[0]
    if array.ndim != num_dims:
        raise ValueError(f"{what} have shape {list(array.shape)}")
    return array


def _spans(content: FileContent, length: int) -> tuple[tuple[int, int], ...] | None:
    given, mask = content.get("spans"), content.get("loss_mask")
    if isinstance(given, FileTensor):
        spans = tuple((int(start), int(end)) for start, end in given.array.reshape(-1, 2))
        check_spans(spans, length)
        return spans
    if not isinstance(mask, FileTensor):
        return None
    return spans_of_mask(_unbatched(mask.array, 1, "the loss mask"))


def spans_of_mask(mask: Array) -> tuple[tuple[int, int], ...]:
    """Runs of positions where the mask is not zero."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (mask != 0).astype(np.int8), [0]])))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def mask_of_spans(spans: Sequence[tuple[int, int]], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """1 inside spans, 0 elsewhere: the inverse of `spans_of_mask` for spans that do not touch."""
    mask = np.zeros(length, dtype="<i8")
    for start, end in spans:
        mask[start:end] = 1
    return mask


def _states(content: FileContent, num_aux: int, hidden_size: int) -> tuple[StoredTensor, StoredTensor]:
    found = {
        name: _slots(name, content[name], hidden_size)
        for name in (*_AUX, *_LAST, *_EITHER)
        if name in content
    }
    aux = [(name, tensor) for name, tensor in found.items() if name in _AUX]
    last = [(name, tensor) for name, tensor in found.items() if name in _LAST]
    for name, tensor in found.items():
        if name not in _EITHER:
            continue
        num_slots = tensor.shape[1]
        if num_slots == num_aux + 1 and not aux and not last:
            aux.append((name, _cut(tensor, slice(0, num_aux))))
            last.append((name, _cut(tensor, slice(num_aux, None))))
        elif num_slots == num_aux and not aux:
            aux.append((name, tensor))
        else:
            last.append((name, tensor))
    if len(aux) != 1 or len(last) != 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in found.items()) or "no states"
        missing = "aux states" if len(aux) != 1 else "last states"
        raise ValueError(f"cannot tell {missing} of {num_aux} layers and width {hidden_size} from {shapes}")
    for name, tensor, num_slots in ((*aux[0], num_aux), (*last[0], 1)):
        if tensor.shape[1] != num_slots:
            raise ValueError(f"{name} holds {tensor.shape[1]} layers, expected {num_slots}")
    states = last[0][1]
    if aux[0][1].dtype != states.dtype:
        raise ValueError(f"aux states are {aux[0][1].dtype}, last states {states.dtype}")
    return aux[0][1], StoredTensor(states.dtype, states.array[:, 0])


def _slots(name: str, found: FileTensor | Sequence[FileTensor], hidden_size: int) -> StoredTensor:
    """A tensor of states as ``[rows, slots, H]``."""
    if not isinstance(found, FileTensor):
        layers = [_slots(name, layer, hidden_size) for layer in found]
        if not layers or len({(layer.dtype, layer.shape[0]) for layer in layers}) != 1:
            raise ValueError(f"the layers of {name} differ in dtype or length, or there are none")
        return StoredTensor(layers[0].dtype, np.concatenate([layer.array for layer in layers], axis=1))
    if found.dtype not in STATE_DTYPES:
        raise ValueError(f"{name} is {found.dtype}, which is no dtype of states")
    array = found.array
    if array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim < 2 or array.ndim > 3 or array.shape[-1] == 0 or array.shape[-1] % hidden_size:
        raise ValueError(
            f"{name} has shape {list(found.array.shape)}, which width {hidden_size} does not divide"
        )
    slots = array.reshape(array.shape[0], -1, hidden_size)
    return StoredTensor(found.dtype, slots)


def _cut(tensor: StoredTensor, slots: slice) -> StoredTensor:
    return StoredTensor(tensor.dtype, tensor.array[:, slots])


def hole_in(tensor: StoredTensor, zero_slots: Sequence[int] = ()) -> str | None:
    """Where a tensor ``[rows, slots, H]`` or ``[rows, H]`` has a hole of zeros or a row of them.

    Args:
        zero_slots: slots that may be zero (layer 0 is a token's embedding, which may be).
    """
    array = tensor.array if tensor.array.ndim == 3 else tensor.array[:, None]
    bits = array.view(np.dtype(f"u{array.itemsize}"))
    sign_off = (bits.dtype.type(1) << (8 * array.itemsize - 1)) - bits.dtype.type(1)
    block = max(1, _BLOCK_BYTES // array.itemsize)
    for slot in range(array.shape[1]):
        if slot in zero_slots:
            continue
        rows = np.ascontiguousarray(bits[:, slot]) & sign_off
        dead = np.flatnonzero(~rows.any(axis=1))
        if len(dead):
            return f"slot {slot}, row {dead[0]}: all zero"
        flat = rows.reshape(-1)
        whole = flat[: len(flat) // block * block].reshape(-1, block)
        empty = np.flatnonzero(~whole.any(axis=1))
        if len(empty):
            row = int(empty[0]) * block // rows.shape[1]
            return f"slot {slot}, row {row}: a hole of zeros"
    return None
