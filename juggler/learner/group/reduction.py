"""Gradients of several learners, each on a sample of its own, as of one learner on all of them.

What a learner finds in its sample for a module are means over live steps, so the mean over all
samples weights each learner's by its count of them. Gradients, counts, buffers and the means that
an algorithm decides by go through one reduction, as one flat vector. Modules that share parameters
have counts of their own, and so have their parts in the gradient until these are means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Aux, GradientAux, Grads


class _Found(NamedTuple):
    """What one learner found for one parameter group, with all modules of that."""

    gradients: dict[str, Tensor]  # [P] by module id
    aux: GradientAux


class _Weighted(NamedTuple):
    """Means over the same live steps."""

    means: list[Tensor]  # of any shape, in the gradient's dtype
    live_steps: Tensor  # []


def mean_over_learners(
    grads: Grads, aux: Aux, nothing: tuple[Grads, Aux], total: Callable[[Tensor], Tensor]
) -> tuple[Grads, Aux]:
    """
    Args:
        grads: of this learner, by parameter group.
        aux: the same.
        nothing: of a sample without a live step, for the parameter groups and modules that this
            learner's sample has no part of: all learners must reduce the same.
        total: sums a vector [B] over the learners, elementwise.

    Returns:
        Those of all learners' samples; metrics are still this learner's own.
    """
    groups = {group_id: _found(group_id, grads, aux, nothing) for group_id in sorted(nothing[1])}
    weighted = {group_id: list(_weighted(found)) for group_id, found in groups.items()}
    sizes = [mean.numel() for each in weighted.values() for one in each for mean in one.means]
    flat = next(iter(nothing[0].values())).new_empty(sum(sizes))  # [B]
    places = iter(torch.split(flat, sizes))  # [...] flattened
    for means, live_steps in (one for each in weighted.values() for one in each):
        for mean in means:
            torch.mul(mean.reshape(-1), live_steps, out=next(places))
    sums = iter(torch.split(total(flat), sizes))  # [...] flattened
    reduced = {group_id: _taken_apart(sums, found) for group_id, found in groups.items()}
    return (
        {
            group_id: reduce(torch.add, found.gradients.values())
            for group_id, found in reduced.items()
        },
        {group_id: found.aux for group_id, found in reduced.items()},
    )


def _found(group_id: str, grads: Grads, aux: Aux, nothing: tuple[Grads, Aux]) -> _Found:
    none, own = nothing[1][group_id], aux.get(group_id, nothing[1][group_id])
    whole = GradientAux(
        live_steps={**none.live_steps, **own.live_steps},
        metrics=own.metrics,
        buffers=own.buffers,
        means={**none.means, **own.means},
        gradients={**none.gradients, **own.gradients},
    )
    if whole.gradients:
        return _Found(whole.gradients, whole)
    (module_id,) = whole.live_steps
    return _Found({module_id: grads.get(group_id, nothing[0][group_id])}, whole)


def _weighted(found: _Found) -> Iterator[_Weighted]:
    """All that is reduced for one parameter group: what is of each module, then the buffers."""
    aux = found.aux
    for module_id, gradient in sorted(found.gradients.items()):
        means = [mean.to(gradient.dtype) for _, mean in sorted(aux.means[module_id].items())]  # []
        one = gradient.new_ones(1)  # [1]: its sum is the count
        yield _Weighted([gradient, one, *means], aux.live_steps[module_id])
    live_steps = reduce(torch.add, aux.live_steps.values())  # []
    buffers = [buffer.to(gradient.dtype) for buffer in _reduced(aux).values()]
    # Of a sample without a live step they may be anything.
    yield _Weighted([torch.where(live_steps > 0, x, 0.0) for x in buffers], live_steps)  # [...]


def _taken_apart(sums: Iterator[Tensor], found: _Found) -> _Found:
    """The other way round, from sums over live steps of all learners, which it divides in place."""
    aux = found.aux
    gradients, live_steps, means = {}, {}, {}
    for module_id in sorted(found.gradients):
        gradient, steps = next(sums), next(sums).squeeze(0)  # [P], []
        gradients[module_id] = gradient.div_(steps.clamp(min=1))  # [P]
        means[module_id] = {
            name: next(sums).squeeze(0) / steps.clamp(min=1)
            for name in sorted(aux.means[module_id])
        }  # [] each
        live_steps[module_id] = steps.round().to(aux.live_steps[module_id].dtype)  # []
    steps = reduce(torch.add, live_steps.values())  # []
    buffers = dict(aux.buffers)
    for name, buffer in _reduced(aux).items():
        mean = (next(sums) / steps.clamp(min=1)).view(buffer.shape).to(buffer.dtype)  # [...]
        buffers[name] = torch.where(steps > 0, mean, buffer)  # [...]
    return _Found(
        gradients,
        GradientAux(live_steps, aux.metrics, buffers, means, gradients if aux.gradients else {}),
    )


def _reduced(aux: GradientAux) -> dict[str, Tensor]:
    """Buffers that are estimates; others count passes, which learners make alike."""
    return {name: buffer for name, buffer in aux.buffers.items() if buffer.is_floating_point()}
