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
    pieces = {unit_id: list(_means(grads[unit_id], aux[unit_id])) for unit_id in units}
    lengths = [sum(piece.numel() for piece in pieces[unit_id]) for unit_id in units]
    flat = grads[units[0]].new_empty(sum(lengths))  # [B]
    for unit_id, part in zip(units, torch.split(flat, lengths), strict=True):
        _add_up(pieces[unit_id], _live_steps(aux[unit_id]), part)
    parts = dict(zip(units, torch.split(total(flat), lengths), strict=True))
    means, reduced = {}, {}
    for unit_id, part in parts.items():
        means[unit_id], reduced[unit_id] = _taken_apart(part, pieces[unit_id], aux[unit_id])
    return means, reduced


def _live_steps(aux: UnitAux) -> Tensor:
    (live_steps,) = aux.live_steps.values()
    return live_steps


def _means(gradient: Tensor, aux: UnitAux) -> Iterator[Tensor]:
    """What is reduced for one unit, in the gradient's dtype: means over live steps."""
    yield gradient  # [P]
    yield gradient.new_ones(1)  # [1]: its sum is the count
    (means,) = aux.means.values()
    for _, mean in sorted(means.items()):
        yield mean.to(gradient.dtype)  # []
    for buffer in _reduced(aux):
        # Of a sample without a live step they may be anything.
        yield torch.where(_live_steps(aux) > 0, buffer.to(gradient.dtype), 0.0)  # [...]


def _add_up(means: list[Tensor], live_steps: Tensor, sums: Tensor) -> None:
    """Sums [L] over live steps, each in its place."""
    for mean, place in zip(means, torch.split(sums, [mean.numel() for mean in means]), strict=True):
        torch.mul(mean.reshape(-1), live_steps, out=place)


def _taken_apart(sums: Tensor, pieces: list[Tensor], aux: UnitAux) -> tuple[Tensor, UnitAux]:
    """The other way round, for one unit: divides its sums [L] in place."""
    ((module_id, own_live_steps),) = aux.live_steps.items()
    steps = sums[len(pieces[0])].clone()  # []
    sums /= steps.clamp(min=1)  # [L]
    found = iter(torch.split(sums, [piece.numel() for piece in pieces]))
    gradient, _ = next(found), next(found)  # [P], [1]
    means = {name: next(found).squeeze(0) for name in sorted(aux.means[module_id])}  # []
    buffers = {}
    for name, buffer in aux.buffers.items():
        if buffer.is_floating_point():
            mean = next(found).view(buffer.shape).to(buffer.dtype)  # [...]
            buffers[name] = torch.where(steps > 0, mean, buffer)  # [...]
        else:
            buffers[name] = buffer
    return gradient, aux._replace(
        live_steps={module_id: steps.round().to(own_live_steps.dtype)},
        means={module_id: means},
        buffers=buffers,
    )


def _reduced(aux: UnitAux) -> list[Tensor]:
    """Buffers that are estimates; others count passes, which learners make alike."""
    return [buffer for buffer in aux.buffers.values() if buffer.is_floating_point()]
