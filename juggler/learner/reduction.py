"""Gradients of several learners, each on a sample of its own, as of one learner on all of them.

What a learner finds in its sample are means over live steps, so the mean over all samples weights
each learner's by its count of them. Gradients, counts, buffers and the means that an algorithm
decides by go through one reduction, as one flat vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from juggler.learner.core import Aux, Grads, UnitAux


def mean_over_learners(
    grads: Grads, aux: Aux, nothing: tuple[Grads, Aux], total: Callable[[Tensor], Tensor]
) -> tuple[Grads, Aux]:
    """
    Args:
        grads: of this learner, by unit; each unit is one module.
        aux: the same.
        nothing: of a sample without a live step, for units that this learner's has no part of:
            all learners must reduce the same.
        total: sums a vector [B] over the learners, elementwise.

    Returns:
        Those of all learners' samples; metrics are still this learner's own.
    """
    grads, aux = {**nothing[0], **grads}, {**nothing[1], **aux}
    units = sorted(aux)
    pieces = [x for unit_id in units for x in _sums(grads[unit_id], aux[unit_id])]
    flat = torch.cat([piece.reshape(-1) for piece in pieces])  # [B]
    sums = iter(torch.split(total(flat), [piece.numel() for piece in pieces]))
    found = {unit_id: _means(grads[unit_id], aux[unit_id], sums) for unit_id in units}
    return {key: mean for key, (mean, _) in found.items()}, {key: a for key, (_, a) in found.items()}


def _sums(gradient: Tensor, aux: UnitAux) -> Iterator[Tensor]:
    """What is to be added up for one unit, in the gradient's dtype; the count comes first."""
    ((module_id, live_steps),) = aux.live_steps.items()
    steps = live_steps.to(gradient.dtype)  # []
    yield steps
    yield gradient * steps  # [P]
    for _, mean in sorted(aux.means[module_id].items()):
        yield mean.to(gradient.dtype) * steps  # []
    for buffer in _reduced(aux):
        # Of a sample without a live step they may be anything.
        yield torch.where(live_steps > 0, buffer.to(gradient.dtype) * steps, 0.0)  # [...]


def _means(gradient: Tensor, aux: UnitAux, sums: Iterator[Tensor]) -> tuple[Tensor, UnitAux]:
    """The other way round: takes the sums of one unit, and divides them."""
    ((module_id, live_steps),) = aux.live_steps.items()
    steps = next(sums).squeeze(0)  # []
    divisor = steps.clamp(min=1)  # []
    mean_gradient = next(sums) / divisor  # [P]
    means = {name: next(sums).squeeze(0) / divisor for name in sorted(aux.means[module_id])}  # []
    buffers = {}
    for name, buffer in aux.buffers.items():
        if buffer.is_floating_point():
            mean = (next(sums) / divisor).view(buffer.shape).to(buffer.dtype)  # [...]
            buffers[name] = torch.where(steps > 0, mean, buffer)  # [...]
        else:
            buffers[name] = buffer
    return mean_gradient, aux._replace(
        live_steps={module_id: steps.round().to(live_steps.dtype)},
        means={module_id: means},
        buffers=buffers,
    )


def _reduced(aux: UnitAux) -> list[Tensor]:
    """Buffers that are estimates; others count passes, which learners make alike."""
    return [buffer for buffer in aux.buffers.values() if buffer.is_floating_point()]
