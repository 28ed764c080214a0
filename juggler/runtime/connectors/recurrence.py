"""Linear recurrences over time, without a loop over it."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_recurrence(a: Tensor, b: Tensor, x_last: Tensor) -> Tensor:
    """Solves x_t = b_t + a_t x_{t+1} for x_0 … x_{T-1}, where x_T is `x_last`.

    One step of the recurrence is the map x -> b + a x. The composition of two such maps has the
    same form. Composing each map with the one 1, 2, 4, … places after it covers the rest of the row
    after log2 T rounds.

    Args:
        a: [..., T]
        b: [..., T]
        x_last: [...]

    Returns:
        x: [..., T]
    """
    length = a.shape[-1]
    b = torch.cat([b[..., :-1], (b[..., -1] + a[..., -1] * x_last).unsqueeze(-1)], -1)  # [..., T]
    reach, a = 1, a[..., :-1]
    while reach < length:
        # Maps within `reach` of the end already cover the rest of the row, and need no partner:
        # a is [..., T - reach].
        b = torch.cat([b[..., :-reach] + a * b[..., reach:], b[..., -reach:]], -1)  # [..., T]
        a = a[..., :-reach] * a[..., reach:]  # [..., T - 2 reach]
        reach *= 2
    return b
