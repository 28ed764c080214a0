"""Two ways to the gradient of a unit's losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from juggler.learner.core import UnitAux

#: Parameters [P] -> the sum [] of a unit's losses, and all else about them.
Losses = Callable[[Tensor], tuple[Tensor, UnitAux]]


def gradient_of(losses: Losses, parameters: Tensor) -> tuple[Tensor, UnitAux]:
    """Of losses at parameters [P] -> [P], and what else they return."""
    parameters = parameters.detach().requires_grad_()  # [P]
    total, aux = losses(parameters)
    (found,) = torch.autograd.grad(total, parameters)  # [P]
    return found, aux


def functional_gradient_of(losses: Losses, parameters: Tensor) -> tuple[Tensor, UnitAux]:
    """The same, slower, as `torch.func.vmap` can map it."""
    found, aux = torch.func.grad(losses, has_aux=True)(parameters)  # [P]
    return found, aux
