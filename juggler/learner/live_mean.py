"""Means over live steps."""

from __future__ import annotations

import torch
from torch import Tensor


class LiveMean:
    """The mean over the live steps of a batch; 0 where it has none.

    Attributes:
        live_steps: how many there are, 0-d int64.
    """

    def __init__(self, live: Tensor) -> None:
        """Args:
        live: [N, T] bool
        """
        self.live_steps = live.sum()  # []
        self._weights = (live / self.live_steps.clamp(min=1)).flatten()  # [N T]

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [N, T], finite even where steps are not live -> []."""
        return torch.dot(self._weights.to(x.dtype), x.flatten())  # []

    def variance(self, x: Tensor) -> Tensor:
        """Of x [N, T] -> []."""
        return self((x - self(x)).square())  # []
