"""Attention of a step against one softmax written out, with scores that overflow or underflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.drafter import attention
from eyas.drafter.attention import plan_attention, step_attention

pytestmark = pytest.mark.usefixtures("passes")

HEADS, GROUPS, WIDTH = 4, 2, 6
CPU = torch.device("cpu")


@pytest.fixture(
    autouse=True, params=[(True, True), (False, False), (True, False)], ids=["flash", "blocks", "both"]
)
def kernel(request, monkeypatch):
    """Each test runs with the fused kernel, with products of blocks, and with one for each pass."""
    forward, backward = request.param
    monkeypatch.setattr(attention, "USE_FLASH", {"forward": forward, "backward": backward})
    plan = plan_attention(np.arange(2), [0, 2], HEADS, CPU, torch.float32)
    assert (plan.forward.flash, plan.backward.flash) == request.param


def written_out(query, key, value, own_key, own_value, rows, bounds):
    """Row by row and head by head, in float64."""
    output = []
    for place, row in enumerate(rows):
        first = max(bound for bound in bounds if bound <= row)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            keys = torch.cat([key[first : row + 1, group], own_key[:, place, group]]).double()
            values = torch.cat([value[first : row + 1, group], own_value[:, place, group]]).double()
            weights = torch.softmax(keys @ query[place, head].double() / WIDTH**0.5, dim=0)
            output.append(weights @ values)
    return torch.stack(output).view(len(rows), HEADS, WIDTH)


def tensors(rows, num_keys, own, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(3)

    def normal(*size):
        return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)

    made = [normal(len(rows), HEADS, WIDTH), *(normal(num_keys, GROUPS, WIDTH) for _ in range(2))]
    made += [normal(own, len(rows), GROUPS, WIDTH) for _ in range(2)]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("block", [1, 2, 128])
@pytest.mark.parametrize("own", [0, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_output_and_gradients(block, own, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_QUERIES", {"blocks": block, "flash": block})
    rows, bounds = np.array([1, 2, 3, 6, 9, 10]), [0, 5, 11]
    inputs = tensors(rows, 11, own, dtype)
    output = step_attention(*inputs, plan_attention(rows, bounds, HEADS, CPU, dtype))
    wanted = written_out(*inputs, rows.tolist(), bounds)
    assert (output.double() - wanted).abs().max() < tolerance
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = torch.autograd.grad((output.double() * weight).sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad((wanted * weight).sum(), inputs, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert other is None or one.numel() == 0 or (one - other).abs().max() < 10 * tolerance
    assert (found[1][4] == 0).all(), "no query of the first sample sees its last row"


@pytest.mark.parametrize("matrix_units", [True, False])
def test_in_bfloat16_the_processor_decides(matrix_units, monkeypatch):
    """The fused kernel forward only with matrix units, never backward; either way the written-out softmax."""
    monkeypatch.setattr(attention, "_matrix_units", lambda: matrix_units)
    rows, bounds = np.array([1, 2, 3, 6, 9, 10]), [0, 5, 11]
    inputs = tensors(rows, 11, 3, torch.bfloat16)
    plan = plan_attention(rows, bounds, HEADS, CPU, torch.bfloat16)
    assert plan.forward.flash == (matrix_units and attention.USE_FLASH["forward"])
    assert not plan.backward.flash
    wanted = written_out(*inputs, rows.tolist(), bounds)
    # values are below 4, where neighbouring numbers of bfloat16 lie 2^-6 apart
    assert (step_attention(*inputs, plan).double() - wanted).abs().max() < 2**-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unseen_keys_weigh_nothing_however_large(dtype):
    """A later row's key gives a score thousands above all others: it must neither be seen nor overflow."""
    rows = np.arange(5)
    inputs = tensors(rows, 5, 1, dtype)
    with torch.no_grad():
        inputs[1][4] *= 1e6
        inputs[2][4] *= 1e6
    plan = plan_attention(rows, [0, 5], HEADS, CPU, dtype)
    output = step_attention(*inputs, plan)
    wanted = written_out(*inputs, rows.tolist(), [0, 5])
    assert (output[:4].double() - wanted[:4]).abs().max() < 2e-5
    gradients = torch.autograd.grad(output[:4].sum(), inputs)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[1][4] == 0).all()
    assert (gradients[2][4] == 0).all()


def test_scores_far_apart_neither_overflow_nor_vanish():
    rows = np.arange(6)
    inputs = tensors(rows, 6, 2, torch.float32, scale=40.0)
    output = step_attention(*inputs, plan_attention(rows, [0, 6], HEADS, CPU, torch.float32))
    wanted = written_out(*inputs, rows.tolist(), [0, 6])
    assert (output.double() - wanted).abs().max() < 1e-2  # of values about 40 wide
    assert torch.isfinite(output).all()
