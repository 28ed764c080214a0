"""The hyperbolic tangent, made fast where torch's is slow."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

# Fewer numbers than this are done sooner in the one operation of torch.tanh.
_WORTH_IT = 1 << 14


class Tanh(nn.Module):
    """tanh, by way of the sigmoid for large tensors on the CPU.

    There torch computes tanh one careful number after the other, ten times slower than a sigmoid;
    in an update of a small perceptron that was a third of all time. tanh(x) = 2 sigmoid(2x) - 1 is
    within 2e-7 of it.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Who compiles or exports gets the operation as such, for every size.
        if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() < _WORTH_IT:
            return torch.tanh(x)
        y: Tensor = _TanhBySigmoid.apply(x)  # type: ignore[no-untyped-call]
        return y


class _TanhBySigmoid(torch.autograd.Function):
    """Keeps its output alone for the backward pass, as torch.tanh does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sigmoid(2 * x).mul_(2).sub_(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        onward: Tensor = torch.ops.aten.tanh_backward(gradient, y)
        return onward


# torch asks for it in every call, and to make it takes longer than the rest of the call.
_TanhBySigmoid.forward.__signature__ = signature(_TanhBySigmoid.forward)  # type: ignore[attr-defined]
