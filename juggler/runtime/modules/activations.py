"""A hyperbolic tangent that is fast on CPUs where torch's is slow."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

# Below this size, torch.tanh is faster.
_WORTH_IT = 1 << 14


class Tanh(nn.Module):
    """tanh, computed from the sigmoid for large tensors on CPUs that are not Intel's.

    There, torch's tanh takes ten times as long as its sigmoid; in an update of a small perceptron
    it took a third of the time. tanh(x) = 2 sigmoid(2x) - 1 differs from it by at most 2e-7. On
    Intel's, torch's tanh is that of MKL, which takes no longer than the sigmoid alone.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Compilation and export get the plain operation, for every size.
        if (
            x.device.type != "cpu"
            or torch.compiler.is_compiling()
            or x.numel() < _WORTH_IT
            or _mkl_is_fast()
        ):
            return torch.tanh(x)
        y: Tensor = _TanhBySigmoid.apply(x)  # type: ignore[no-untyped-call]
        return y


@cache
def _mkl_is_fast() -> bool:
    """Whether torch computes tanh with MKL, on a CPU that MKL has fast code for."""
    try:
        with open("/proc/cpuinfo") as told:
            intel = "GenuineIntel" in told.read(1000)
    except OSError:  # a system that does not say
        intel = False
    return intel and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


class _TanhBySigmoid(torch.autograd.Function):
    """Stores only its output for the backward pass, as torch.tanh does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (2 * x).sigmoid_().mul_(2).sub_(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        onward: Tensor = torch.ops.aten.tanh_backward(gradient, y)
        return onward


# torch asks for the signature in every call, and making it takes longer than the rest of the call.
_TanhBySigmoid.forward.__signature__ = signature(_TanhBySigmoid.forward)  # type: ignore[attr-defined]
