"""The compiled passes of ``rows.cpp``, as functions of tensors.

They are built when eyas is installed, once for each of three generations of processors, where there is a
C++ compiler. Everything that calls them has another way without them, to which tests hold the results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REVISION = 1
"""Of the functions' arguments; the same number stands in ``rows.cpp``."""
USE = {"compiled": True}
"""Take the compiled passes where they are; off: torch's operations."""

_BUILDS = {"AVX512": ("_rows_v4", "_rows_v3", "_rows"), "AVX2": ("_rows_v3", "_rows")}
_FOR_ANY = ("_rows",)
_LARGE_COPY = 1 << 20  # bytes from which a copy is shared among threads
# p: a pointer, i: int64, f: float; in the order of rows.cpp
_ARGUMENTS = {
    "loss_rows": "pppiiiiffpi",
    "softmax_rows": "ppppiii",
    "norm_forward": "ppfppiii",
    "norm_backward": "ppppppiii",
    "gate_forward": "pppii",
    "gate_backward": "pppppii",
    "turn": "pippfpiiii",
    "weights_of_scores": "pppiiiii",
    "gradient_of_scores": "pppppiiiii",
    "own_forward": "pppppiiiiii",
    "own_backward": "pppppppppiiiiii",
}
_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
}
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The passes in one arithmetic.

    Tensors of that arithmetic are called narrow below, others are float32. All are on the CPU and contiguous
    unless said otherwise.
    """

    def __init__(self, handle: ctypes.CDLL, suffix: str) -> None:
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            address = ctypes.c_void_p.in_dll(handle, f"eyas_{name}_{suffix}").value
            assert address is not None
            kind = ctypes.CFUNCTYPE(None, *(_TYPES[letter] for letter in arguments))
            self._functions[name] = kind(address)

    def loss_rows(
        self,
        logits: Tensor,
        teacher: Tensor,
        mass: Tensor | None,
        *,
        kind: str,
        weight: float | None,
        least: float,
    ) -> Tensor:
        """Row losses ``[r]`` of narrow logits ``[r, K]``; see `eyas.drafter.loss`.

        Args:
            teacher: ``[r, K]``.
            mass: ``[r, 1]``; needed by ``lk`` and ``mixed``.
            kind: ``soft_ce``, ``lk`` or ``mixed``.
            weight: given, the logits become the gradient of the weighted losses.
            least: acceptance below which a row has no gradient.
        """
        losses = torch.empty(len(logits), dtype=torch.float32)
        self._functions["loss_rows"](
            logits.data_ptr(),
            teacher.data_ptr(),
            0 if mass is None else mass.data_ptr(),
            *logits.shape,
            ("soft_ce", "lk", "mixed").index(kind),
            weight is not None,
            weight or 0.0,
            least,
            losses.data_ptr(),
            torch.get_num_threads(),
        )
        return losses

    def softmax_rows(self, logits: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of narrow logits ``[r, K]``: softmax p, log-sum-exp ``[r, 1]``, and sum p log p ``[r]``."""
        powers = torch.empty(logits.shape, dtype=torch.float32)
        normaliser = torch.empty(len(logits), 1, dtype=torch.float32)
        entropies = torch.empty(len(logits), dtype=torch.float32) if entropy else None
        self._functions["softmax_rows"](
            logits.data_ptr(),
            powers.data_ptr(),
            normaliser.data_ptr(),
            0 if entropies is None else entropies.data_ptr(),
            *logits.shape,
            torch.get_num_threads(),
        )
        return powers, normaliser, entropies

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Narrow ``x [..., H]`` normed, and what its rows were multiplied with ``[n]``."""
        normed = torch.empty_like(x)
        num_rows = x.numel() // x.shape[-1]
        scales = torch.empty(num_rows, dtype=torch.float32)
        self._functions["norm_forward"](
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            normed.data_ptr(),
            scales.data_ptr(),
            num_rows,
            x.shape[-1],
            torch.get_num_threads(),
        )
        return normed, scales

    def norm_gradient(
        self, d_normed: Tensor, x: Tensor, weight: Tensor, scales: Tensor, *, of_x: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of ``x`` (None where not asked for) and of the weight, float32."""
        d_x = torch.empty_like(x) if of_x else None
        d_weight = torch.empty(weight.shape, dtype=torch.float32)
        self._functions["norm_backward"](
            d_normed.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            scales.data_ptr(),
            0 if d_x is None else d_x.data_ptr(),
            d_weight.data_ptr(),
            len(scales),
            x.shape[-1],
            torch.get_num_threads(),
        )
        return d_x, d_weight

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``, all narrow."""
        gated = torch.empty_like(gate)
        self._functions["gate_forward"](
            gate.data_ptr(), up.data_ptr(), gated.data_ptr(), gate.numel(), torch.get_num_threads()
        )
        return gated

    def gate_gradient(self, d_gated: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        self._functions["gate_backward"](
            d_gated.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            d_gate.data_ptr(),
            d_up.data_ptr(),
            gate.numel(),
            torch.get_num_threads(),
        )
        return d_gate, d_up

    def turn(self, x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool = False) -> Tensor:
        """Narrow ``x [n, heads, D]`` turned by angles ``[n, D / 2]``; its rows may lie apart."""
        turned = torch.empty(x.shape, dtype=x.dtype)
        self._functions["turn"](
            x.data_ptr(),
            x.stride(0),
            cosine.data_ptr(),
            sine.data_ptr(),
            -1.0 if back else 1.0,
            turned.data_ptr(),
            *x.shape,
            torch.get_num_threads(),
        )
        return turned

    def weights_of_scores(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Narrow scores ``[G, n, group, r]`` become softmax weights; their log-sum-exp ``[G, n, group]``.

        Args:
            seen: int64 ``[n]``, how many keys a query sees; where it sees none, its weights are zeros.
        """
        normaliser = torch.empty(scores.shape[:-1], dtype=torch.float32)
        self._functions["weights_of_scores"](
            scores.data_ptr(), seen.data_ptr(), normaliser.data_ptr(), *scores.shape, torch.get_num_threads()
        )
        return normaliser

    def gradient_of_scores(
        self, scores: Tensor, d_weights: Tensor, seen: Tensor, normaliser: Tensor, mean: Tensor
    ) -> None:
        """Scores become weights, and d(weights) become d(scores).

        Args:
            normaliser: ``[G, n, group]``, log-sum-exp of the whole softmax.
            mean: ``[G, n, group]``, sum of weight * d(weight).
        """
        self._functions["gradient_of_scores"](
            scores.data_ptr(),
            d_weights.data_ptr(),
            seen.data_ptr(),
            normaliser.data_ptr(),
            mean.data_ptr(),
            *scores.shape,
            torch.get_num_threads(),
        )

    def merge_own(
        self, query: Tensor, own_key: Tensor, own_value: Tensor, output: Tensor, normaliser: Tensor
    ) -> None:
        """Merge own keys and values ``[j, n, G, D]`` into a narrow output ``[n, heads, D]`` and its
        ``normaliser [n, heads]``."""
        self._functions["own_forward"](
            query.data_ptr(),
            own_key.data_ptr(),
            own_value.data_ptr(),
            output.data_ptr(),
            normaliser.data_ptr(),
            *_sizes(query, own_key),
            torch.get_num_threads(),
        )

    def merge_own_gradient(
        self,
        d_output: Tensor,
        query: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        output: Tensor,
        normaliser: Tensor,
        d_query: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of own keys and values; that of the query is added to ``d_query``."""
        d_own_key, d_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        self._functions["own_backward"](
            d_output.data_ptr(),
            query.data_ptr(),
            own_key.data_ptr(),
            own_value.data_ptr(),
            output.data_ptr(),
            normaliser.data_ptr(),
            d_query.data_ptr(),
            d_own_key.data_ptr(),
            d_own_value.data_ptr(),
            *_sizes(query, own_key),
            torch.get_num_threads(),
        )
        return d_own_key, d_own_value


def _sizes(query: Tensor, own: Tensor) -> Sequence[int]:
    steps, rows, groups, width = own.shape
    return steps, rows, groups, query.shape[1] // groups, width


def copy_rows(place: Tensor, rows: Tensor) -> None:
    """``place.copy_(rows)``; ``[n, c]`` of one type on the CPU are written past the caches."""
    alike = place.dtype == rows.dtype and place.shape == rows.shape
    here = place.device.type == rows.device.type == "cpu"
    even = place.ndim == 2 and place.stride(1) == rows.stride(1) == 1
    copy = _copy() if alike and here and even and USE["compiled"] else None
    if copy is None:
        place.copy_(rows)
        return
    size = rows.element_size()
    many = rows.numel() * size >= _LARGE_COPY
    copy(
        place.data_ptr(),
        place.stride(0) * size,
        rows.data_ptr(),
        rows.stride(0) * size,
        len(rows),
        rows.shape[1] * size,
        torch.get_num_threads() if many else 1,
    )


def kernels_for(x: Tensor) -> Kernels | None:
    """The passes for a tensor's arithmetic and device, where there are any."""
    if x.device.type != "cpu" or x.dtype not in _SUFFIXES or not USE["compiled"]:
        return None
    return _kernels(x.dtype)


def why_not() -> str | None:
    """Why there are no compiled passes on this machine; None where there are."""
    found = _library()
    return found if isinstance(found, str) else None


@cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    found = _library()
    return None if isinstance(found, str) else Kernels(found, _SUFFIXES[dtype])


@cache
def _copy() -> Callable[..., None] | None:
    found = _library()
    if isinstance(found, str):
        return None
    function = found.eyas_copy_rows
    function.restype, function.argtypes = None, [_TYPES[letter] for letter in "pipiiii"]
    return function


@cache
def _library() -> ctypes.CDLL | str:
    """The build for this processor, or why there is none."""
    names = _BUILDS.get(torch.backends.cpu.get_cpu_capability(), _FOR_ANY)
    paths = [Path(__file__).with_name(name + EXTENSION_SUFFIXES[0]) for name in names]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return "they were not built when eyas was installed, for want of a C++ compiler"
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:  # another OpenMP than torch's was expected
        return f"{path.name} cannot be loaded: {error}"
    if ctypes.c_int64.in_dll(handle, "eyas_rows_revision").value != REVISION:
        return "they were built from other source than this; install eyas again"
    return handle
