"""Reduction: the gradient that one learner would get on the samples of all learners.

A learner's gradient is a mean over the live steps of its sample, so the mean over all samples
weights each learner by its live steps. The gradient, counts, buffers and the algorithm's means go
through one reduction, as one flat vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Aux, Grads


def mean_over_learners(
    grads: Grads, aux: Aux, total: Callable[[Tensor], Tensor]
) -> tuple[Grads, Aux]:
    """Reduce a gradient over all learners.

    Args:
        grads: this learner's gradient [P].
        aux: this learner's other results.
        total: sums a vector [B] elementwise over the learners.

    Returns:
        The gradient and other results for the samples of all learners. Metrics and priorities are
        still this learner's own.
    """
    # Buffers of floats are estimates. Others count passes, and are the same everywhere.
    floats = {name: x for name, x in sorted(aux.buffers.items()) if x.is_floating_point()}
    # Without a live step in the sample, buffers may hold anything.
    buffers = [torch.where(aux.live_steps > 0, x, 0.0) for x in floats.values()]  # [...]
    means = dict(sorted(aux.means.items()))
    one = grads.new_ones(1)  # [1]: its sum is the count
    parts = [grads, one, *means.values(), *buffers]  # [...]
    sizes = [part.numel() for part in parts]
    flat = grads.new_empty(sum(sizes))  # [B]
    for place, part in zip(torch.split(flat, sizes), parts, strict=True):
        torch.mul(part.reshape(-1).to(flat.dtype), aux.live_steps, out=place)
    gradient, count, *sums = torch.split(total(flat), sizes)  # [P], [1], [...]
    steps = count.squeeze(0)  # []
    divisor = steps.clamp(min=1)  # []
    reduced = {name: sums.pop(0).squeeze(0) / divisor for name in means}  # [] each
    found = dict(aux.buffers)
    for name, buffer in floats.items():
        mean = (sums.pop(0) / divisor).view(buffer.shape).to(buffer.dtype)  # [...]
        found[name] = torch.where(steps > 0, mean, buffer)  # [...]
    live_steps = steps.round().to(aux.live_steps.dtype)  # []
    whole = aux._replace(live_steps=live_steps, means=reduced, buffers=found)
    return gradient.div_(divisor), whole
