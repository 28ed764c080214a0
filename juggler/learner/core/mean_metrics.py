"""Metrics: means over several optimizer steps, and conversion to plain numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Metrics


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
