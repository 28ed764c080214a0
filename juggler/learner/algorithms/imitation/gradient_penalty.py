"""The gradient penalty of Gulrajani et al. 2017, "Improved Training of Wasserstein GANs"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_EPSILON = 1e-12  # of squared norms: that of 0 has a gradient too


def gradient_penalties(
    values_of: Callable[[dict[str, Tensor]], Tensor],
    some: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    shares: Tensor,
) -> Tensor:
    """(|∇ f(x)| - 1)² where x = share * some + (1 - share) * others.

    Args:
        values_of: the function f, from rows [B, ...] to values [B], each of its own row.
        some: rows [B, ...] by name.
        others: likewise.
        shares: [B].

    Returns:
        [B], with a graph, so that it can be minimized.
    """
    between = {}
    for name, x in some.items():
        share = shares.view(-1, *[1] * (x.ndim - 1))  # [B, 1...]
        between[name] = torch.lerp(others[name], x, share).requires_grad_()  # [B, ...]
    total = values_of(between).sum()  # []
    gradients = torch.autograd.grad(
        total, list(between.values()), create_graph=True, materialize_grads=True
    )  # [B, ...] each; 0 of what f leaves out
    squares = torch.stack([x.flatten(1).square().sum(1) for x in gradients]).sum(0)  # [B]
    return ((squares + _EPSILON).sqrt() - 1).square()  # [B]
