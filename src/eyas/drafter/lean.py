"""Norm and gate that keep for their gradient what cannot be made again, and nothing else.

Their plain forms, one operation after the other, leave a float32 copy of the input, another one of the normed
input, and the gate's activation behind: half of what a draft step keeps.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.kernels.compiled import kernels_for
from eyas.drafter.wide import wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [..., H]`` over the root of its mean square, times ``weight [H]``, in the type of ``x``.

    The mean and the product are made in float32 or wider.
    """
    if x.device.type != "cpu":  # torch's own kernel there keeps as little
        wide = x.to(wide_dtype(x.dtype))
        return F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps).to(x.dtype)
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two ``[..., I]``, in their arithmetic."""
    gated: Tensor = _SiluGated.apply(gate, up)  # type: ignore[no-untyped-call]
    return gated


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.kernels = kernels_for(x) if weight.dtype == torch.float32 else None
        if ctx.kernels is not None:
            normed, scale = ctx.kernels.norm(x.contiguous(), weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return cast(Tensor, normed)
        wide = x.to(wide_dtype(x.dtype))
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if ctx.kernels is not None:
            of_x, of_weight = ctx.needs_input_grad[:2]
            made, of_rows = ctx.kernels.norm_gradient(
                gradients[0].contiguous(), x.contiguous(), weight, scale, of_x=of_x
            )
            return made, of_rows if of_weight else None, None
        gradient = gradients[0].to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        product = gradient * normed
        d_weight = (
            product.reshape(-1, x.shape[-1]).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        # d(x / r) for r = root of the mean square: what lies along x goes into r and is lost
        along = product.mul_(weight).mean(dim=-1, keepdim=True)
        d_x = (gradient * weight).sub_(normed.mul_(along)).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _SiluGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        kernels = kernels_for(gate)
        if kernels is not None and up.dtype == gate.dtype:
            return kernels.gate(gate.contiguous(), up.contiguous())
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        kernels = kernels_for(gate)
        if kernels is not None and up.dtype == gate.dtype:
            return kernels.gate_gradient(gradients[0].contiguous(), gate.contiguous(), up.contiguous())
        d_up = F.silu(gate).mul_(gradients[0])
        return torch.ops.aten.silu_backward(gradients[0] * up, gate), d_up
