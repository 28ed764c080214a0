"""Two ways to the gradient of a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from juggler.learner.core.learner_core import UnitAux

#: Parameters [P] of a unit -> the loss [] of one of its modules, and all else about it.
LossOf = Callable[[Tensor], tuple[Tensor, UnitAux]]


def gradient_of(loss_of: LossOf, parameters: Tensor) -> tuple[Tensor, UnitAux]:
    """Of a loss at parameters [P] -> [P], and what else it returns."""
    parameters = parameters.detach().requires_grad_()  # [P]
    loss, aux = loss_of(parameters)
    (found,) = torch.autograd.grad(loss, parameters)  # [P]
    return found, aux


def functional_gradient_of(loss_of: LossOf, parameters: Tensor) -> tuple[Tensor, UnitAux]:
    """The same, slower, as `torch.func.vmap` can map it."""
    found, aux = torch.func.grad(loss_of, has_aux=True)(parameters)  # [P]
    return found, aux
