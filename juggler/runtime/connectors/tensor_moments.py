"""Counts, means and sums of squared deviations of numbers on a device, over all learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

#: "count" [], "mean" [...] and "m2" [...], the sum of squared deviations from the mean; float64.
TensorMoments = dict[str, Tensor]


def no_moments(shape: Sequence[int] = ()) -> TensorMoments:
    """The moments of no numbers."""
    nothing = torch.zeros((), dtype=torch.float64)  # []
    zeros = torch.zeros(tuple(shape), dtype=torch.float64)  # [...]
    return {"count": nothing, "mean": zeros, "m2": zeros}


def with_live(
    moments: Mapping[str, Tensor], x: Tensor, live: Tensor, sums: Callable[[Tensor], Tensor]
) -> TensorMoments:
    """The moments with further numbers.

    Sums are of what numbers differ from the mean so far, which all learners have: then they lose no
    digits.

    Args:
        moments: of numbers [...] so far.
        x: [B, ...], more of them.
        live: [B] bool, which of them count.
        sums: adds up numbers over the learners of a group.
    """
    old = {key: value.to(x.device) for key, value in moments.items()}
    counted = live.view(-1, *[1] * (x.ndim - 1))  # [B, ...]
    apart = torch.where(counted, x.double() - old["mean"], 0.0)  # [B, ...]
    own = [live.sum().double().view(1), apart.sum(0).view(-1), apart.square().sum(0).view(-1)]
    size = own[1].numel()
    added, total, squares = torch.split(sums(torch.cat(own)), [1, size, size])
    total, squares = total.view(x.shape[1:]), squares.view(x.shape[1:])  # [...] both
    count = old["count"] + added.squeeze(0)  # []
    # Of old and new numbers together, about the old mean: their mean, and their squares.
    moved = total / count.clamp(min=1)  # [...]
    return {
        "count": count,
        "mean": old["mean"] + moved,
        "m2": (old["m2"] + squares - moved * total).clamp(min=0),
    }


def variance(moments: Mapping[str, Tensor]) -> Tensor:
    """The variance [...] of the numbers; 0 if there are none."""
    return moments["m2"] / moments["count"].clamp(min=1)  # [...]
