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

    def kl(self, log_ratios: Tensor) -> Tensor:
        """KL(μ || π) -> [], from log π/μ [N, T] of actions that μ sampled; μ is what the steps were
        sampled with. Each term is at least 0, and the mean unbiased."""
        return self(log_ratios.exp() - 1 - log_ratios)  # []

    def explained_variance(self, targets: Tensor, errors: Tensor) -> Tensor:
        """How much of the variance of targets [N, T] values explain that are off by errors [N, T]
        -> []: 1 is all, 0 what a constant would."""
        spread = self.variance(targets).clamp(min=1e-8)  # []
        return 1 - self.variance(errors) / spread  # []
