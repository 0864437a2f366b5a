"""States that must not be stored are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eyas.base.errors import CaptureInvalid
from eyas.targets.check import check_capture

LAYERS, WIDTH, TOKENS, ROWS = (0, 3, 5), 24, 700, 400
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def states(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    aux = torch.randn((TOKENS, len(LAYERS), WIDTH), generator=draw).to(dtype)
    return aux, torch.randn((ROWS, WIDTH), generator=draw).to(dtype)


def check(aux: torch.Tensor, last: torch.Tensor, dtype: torch.dtype) -> None:
    check_capture(
        aux, last, num_tokens=TOKENS, num_last_rows=ROWS, aux_layers=LAYERS, hidden_size=WIDTH,
        dtype=dtype, sample="abc",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_good_states_pass(dtype: torch.dtype) -> None:
    aux, last = states(dtype)
    aux[5, 0] = 0  # the embedding of a padding token
    aux[6, 1, 3] = torch.finfo(dtype).max
    aux[7, 1, 3] = torch.finfo(dtype).tiny
    check(aux, last, dtype)
    check_capture(
        aux, last[:0], num_tokens=TOKENS, num_last_rows=0, aux_layers=LAYERS, hidden_size=WIDTH, dtype=dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite(dtype: torch.dtype, value: float) -> None:
    for row in (0, 341, TOKENS - 1):
        aux, last = states(dtype)
        aux[row, 1, WIDTH - 1] = value
        with pytest.raises(CaptureInvalid) as error:
            check(aux, last, dtype)
        assert error.value.why == f"layer 3, row {row}: not finite"
        assert error.value.where == "abc"
    aux, last = states(dtype)
    last[ROWS - 1, 0] = value
    with pytest.raises(CaptureInvalid) as error:
        check(aux, last, dtype)
    assert error.value.why == f"the last state, row {ROWS - 1}: not finite"


def zero_layer(aux: torch.Tensor, last: torch.Tensor) -> None:
    aux[:, 2] = -0.0


def zero_last(aux: torch.Tensor, last: torch.Tensor) -> None:
    last.zero_()


def zero_embeddings(aux: torch.Tensor, last: torch.Tensor) -> None:
    aux[:, 0] = 0


def constant_row(aux: torch.Tensor, last: torch.Tensor) -> None:
    aux[699, 1] = 0.5


def zero_row(aux: torch.Tensor, last: torch.Tensor) -> None:
    aux[699, 2] = 0


def constant_embedding(aux: torch.Tensor, last: torch.Tensor) -> None:
    aux[3, 0] = 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (zero_layer, "layer 5: all zero"),
        (zero_last, "the last state: all zero"),
        (zero_embeddings, "layer 0: all zero"),
        (constant_row, "layer 3, row 699: constant"),
        (zero_row, "layer 5, row 699: constant"),
        (constant_embedding, "layer 0, row 3: constant"),
    ],
)
def test_dead_states(
    dtype: torch.dtype, spoil: Callable[[torch.Tensor, torch.Tensor], None], why: str
) -> None:
    aux, last = states(dtype)
    spoil(aux, last)
    with pytest.raises(CaptureInvalid) as error:
        check(aux, last, dtype)
    assert error.value.why == why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a, h: (a[:-1], h), "aux states: rows 699, expected 700"),
        (lambda a, h: (a[:, :2].contiguous(), h), "aux states: layers 2, expected 3"),
        (lambda a, h: (a[..., :23].contiguous(), h), "aux states: width 23, expected 24"),
        (lambda a, h: (a, h[:-1]), "last states: rows 399, expected 400"),
        (lambda a, h: (a, h[:, :23].contiguous()), "last states: width 23, expected 24"),
        (lambda a, h: (a[0], h), "aux states have 2 dimensions, not 3"),
        (lambda a, h: (a.double(), h), "aux states are torch.float64, not torch.float32"),
        (lambda a, h: (a, h.half()), "last states are torch.float16, not torch.float32"),
        (
            lambda a, h: (a.transpose(0, 1).contiguous().transpose(0, 1), h),
            "aux states are not contiguous in main memory",
        ),
    ],
)
def test_wrong_forms(
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], why: str
) -> None:
    with pytest.raises(CaptureInvalid) as error:
        check(*change(*states(torch.float32)), torch.float32)
    assert error.value.why == why
