"""Norm and gate beside their definitions, and what they keep for their gradient."""

from __future__ import annotations

import pytest
import torch

from eyas.drafter.lean import rms_norm, silu_gated

pytestmark = pytest.mark.usefixtures("passes")

ROWS, WIDTH = 9, 64


def draw(*sizes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def test_gradients_are_those_of_differences():
    x, weight, gate, up = (t.requires_grad_() for t in draw((2, 3, 5), (5,), (4, 6), (4, 6)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(silu_gated, (gate, up))


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2**-20), (torch.bfloat16, 2**-7)])
def test_values_and_gradients_in_narrow_types(dtype, step):
    """Beside the definition in float64 of the same narrow numbers."""
    x, gradient = draw((ROWS, WIDTH), (ROWS, WIDTH), dtype=dtype)
    [weight] = draw((WIDTH,), seed=4, dtype=torch.float32)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = rms_norm(*leaves, 1e-5)
    assert found.dtype == dtype
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = wide[0] / (wide[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[1]
    torch.testing.assert_close(found.double(), exact, rtol=step, atol=step)
    found.backward(gradient)
    exact.backward(gradient.double())
    for leaf, other in zip(leaves, wide, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=step, atol=8 * step)


def test_a_gate_in_bfloat16():
    gate, up, gradient = draw(*[(ROWS, WIDTH)] * 3, seed=2, dtype=torch.bfloat16)
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    found = silu_gated(*leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = wide[0] * wide[0].sigmoid() * wide[1]
    torch.testing.assert_close(found.double(), exact, rtol=2**-6, atol=2**-8)
    found.backward(gradient)
    exact.backward(gradient.double())
    for leaf, other in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=2**-6, atol=2**-7)


def test_inputs_whose_numbers_do_not_lie_side_by_side():
    x, gate, up, gradient = draw(*[(WIDTH, ROWS)] * 2, *[(ROWS, WIDTH)] * 2, dtype=torch.float32)
    weight = torch.ones(WIDTH)
    leaves = [t.requires_grad_() for t in (x, gate, up)]
    found = rms_norm(x.T, weight, 1e-5) + silu_gated(gate.T, up)
    found.backward(gradient)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    normed = wide[0].T / (wide[0].T.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = normed + wide[1].T * wide[1].T.sigmoid() * wide[2]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    exact.backward(gradient.double())
    for leaf, other in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_row_alone(dtype):
    """``[H]`` without any dimension before it."""
    x, gradient = draw((WIDTH,), (WIDTH,), dtype=dtype)
    weight = torch.full((WIDTH,), 2.0, requires_grad=True)
    rms_norm(x.requires_grad_(), weight, 1e-5).backward(gradient)
    exact = x.detach().double().requires_grad_()
    (2 * exact / (exact.square().mean() + 1e-5).sqrt()).backward(gradient.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_a_norm_whose_input_needs_no_gradient():
    x, weight = draw((ROWS, WIDTH), (WIDTH,))
    weight.requires_grad_()
    rms_norm(x, weight, 1e-5).sum().backward()
    exact = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).sum(0)
    torch.testing.assert_close(weight.grad, exact)


def test_what_is_kept():
    """The inputs themselves and one number a row; no copy of anything."""
    x, gate, up = (t.requires_grad_() for t in draw(*[(ROWS, WIDTH)] * 3, dtype=torch.bfloat16))
    weight = torch.ones(WIDTH, requires_grad=True)
    given = {t.data_ptr() for t in (x, gate, up, weight)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
        silu_gated(gate, up)
    assert sum(t.numel() for t in kept if t.data_ptr() not in given) == ROWS
