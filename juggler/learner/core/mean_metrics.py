"""Means over live steps and over optimizer steps, as metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Metrics


class LiveMean:
    """The mean over a batch's live steps; 0 without any.

    Attributes:
        live_steps: their number, 0-d int64.
    """

    def __init__(self, live: Tensor) -> None:
        """Weigh the live steps of `live` [N, T]."""
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


def mean_metrics(each: Sequence[Mapping[str, Tensor]]) -> Metrics:
    """Average each metric [] over its entries, on their device."""
    if len(each) == 1:
        return dict(each[0])
    values = defaultdict[str, list[Tensor]](list)
    for numbers in each:
        for name, value in numbers.items():
            values[name].append(value)
    return {name: torch.stack(x).double().mean() for name, x in values.items()}


def with_numbers(metrics: Metrics, numbers: Mapping[str, float], device: torch.device) -> Metrics:
    """Add numbers to metrics, copied to the device in one transfer."""
    if not numbers:
        return metrics
    sent = torch.tensor(list(numbers.values()), dtype=torch.float64)  # [numbers]
    each = sent.to(device, non_blocking=True).unbind()  # [] each
    return {**metrics, **dict(zip(numbers, each, strict=True))}


def fetch_metrics(metrics: Metrics) -> dict[str, float]:
    """Convert metrics to floats, with one blocking transfer from the device."""
    if not metrics:
        return {}
    values = torch.stack([value.to(torch.float64) for value in metrics.values()])  # [metrics]
    return dict(zip(metrics, values.tolist(), strict=True))
