"""Means over live steps."""

from __future__ import annotations

import torch
from torch import Tensor


class LiveMean:
    """The mean over a batch's live steps; 0 without any.

    Attributes:
        live_steps: their number, 0-d int64.
    """

    def __init__(self, live: Tensor) -> None:
        """Args:
        live: [N, T] bool
        """
        self.live_steps = live.sum()  # []
        self._weights = (live / self.live_steps.clamp(min=1)).flatten()  # [N T]

    def __call__(self, x: Tensor) -> Tensor:
        """Average x [N, T] -> []; it must be finite everywhere."""
        return torch.dot(self._weights.to(x.dtype), x.flatten())  # []

    def variance(self, x: Tensor) -> Tensor:
        """Return the variance of x [N, T] -> []."""
        return self((x - self(x)).square())  # []

    def kl(self, log_ratios: Tensor, ratios: Tensor | None = None) -> Tensor:
        """Estimate KL(μ || π) -> [] from log π/μ [N, T], unbiased.

        `ratios` is π/μ, if already computed. Each term is at least 0 (Schulman 2020, "Approximating
        KL Divergence", k3).
        """
        if ratios is None:
            ratios = log_ratios.exp()  # [N, T]
        return self(ratios - 1 - log_ratios)  # []

    def explained_variance(self, targets: Tensor, errors: Tensor) -> Tensor:
        """Return the share [] of targets' variance [N, T] that values explain.

        1: all of it; 0: no more than a constant.
        """
        spread = self.variance(targets).clamp(min=1e-8)  # []
        return 1 - self.variance(errors) / spread  # []
