"""Reduction: the gradients that one learner would get on the samples of all learners.

A learner's gradients are means over the live steps of its sample, so the mean over all samples
weights each learner by its live steps. Gradients, counts, buffers and the algorithm's means go
through one reduction, as one flat vector. Modules that share parameters have their own counts, so
their parts of the gradient are reduced separately and then added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Aux, GradientAux, Grads


class _Found(NamedTuple):
    """One learner's results for a parameter group, with an entry for each of its modules."""

    gradients: dict[str, Tensor]  # [P] by module id
    aux: GradientAux


class _Weighted(NamedTuple):
    """Tensors that are means over the same live steps."""

    means: list[Tensor]  # of any shape, in the gradient's dtype
    live_steps: Tensor  # []


def mean_over_learners(
    grads: Grads, aux: Aux, nothing: tuple[Grads, Aux], total: Callable[[Tensor], Tensor]
) -> tuple[Grads, Aux]:
    """Reduce gradients over all learners.

    Args:
        grads: this learner's gradients, by parameter group.
        aux: this learner's other results, by parameter group.
        nothing: the same two for a sample without a live step. They stand in for groups and modules
            that this learner's sample lacks, because all learners must reduce the same.
        total: sums a vector [B] elementwise over the learners.

    Returns:
        Gradients and other results for the samples of all learners. Metrics are still this
        learner's own.
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
        priorities=own.priorities,
        new_steps=own.new_steps,
    )
    if whole.gradients:
        return _Found(whole.gradients, whole)
    (module_id,) = whole.live_steps
    return _Found({module_id: grads.get(group_id, nothing[0][group_id])}, whole)


def _weighted(found: _Found) -> Iterator[_Weighted]:
    """All that is reduced for one parameter group: first that of each module, then buffers."""
    aux = found.aux
    for module_id, gradient in sorted(found.gradients.items()):
        means = [mean.to(gradient.dtype) for _, mean in sorted(aux.means[module_id].items())]  # []
        one = gradient.new_ones(1)  # [1]: its sum is the count
        yield _Weighted([gradient, one, *means], aux.live_steps[module_id])
    live_steps = reduce(torch.add, aux.live_steps.values())  # []
    buffers = [buffer.to(gradient.dtype) for buffer in _reduced(aux).values()]
    # Without a live step in the sample, buffers may hold anything.
    yield _Weighted([torch.where(live_steps > 0, x, 0.0) for x in buffers], live_steps)  # [...]


def _taken_apart(sums: Iterator[Tensor], found: _Found) -> _Found:
    """The inverse of `_weighted`: means from sums over all live steps, divided in place."""
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
        GradientAux(
            live_steps,
            aux.metrics,
            buffers,
            means,
            gradients if aux.gradients else {},
            aux.priorities,
            aux.new_steps,
        ),
    )


def _reduced(aux: GradientAux) -> dict[str, Tensor]:
    """Buffers of floats, which are estimates. Others count passes, and are the same everywhere."""
    return {name: buffer for name, buffer in aux.buffers.items() if buffer.is_floating_point()}
