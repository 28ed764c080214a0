"""Metrics: means over several optimizer steps, and conversion to plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Metrics


def mean_metrics(each: Sequence[Metrics]) -> Metrics:
    """Each module's means over the entries that have the name, computed on the device."""
    if len(each) == 1:
        return each[0]
    means: Metrics = {}
    for module_id in dict.fromkeys(module_id for metrics in each for module_id in metrics):
        own = [metrics[module_id] for metrics in each if module_id in metrics]
        values: dict[str, list[Tensor]] = {}
        for metrics in own:
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)  # []
        means[module_id] = {name: torch.stack(x).float().mean() for name, x in values.items()}
    return means


def with_numbers(
    metrics: Metrics, numbers: Mapping[str, Mapping[str, float]], device: torch.device
) -> Metrics:
    """Metrics with further numbers by module id, of those modules that have metrics."""
    found: Metrics = {}
    for module_id, values in metrics.items():
        own = numbers.get(module_id, {})
        sent = torch.tensor(list(own.values()), dtype=torch.float64)  # [numbers]
        each = sent.to(device, non_blocking=True).unbind()  # [] each
        found[module_id] = {**values, **dict(zip(own, each, strict=True))}
    return found


def fetch_metrics(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Metrics as plain numbers, with one transfer from the device; waits for it."""
    names = [(module_id, name) for module_id, values in metrics.items() for name in values]
    if not names:
        return {}
    tensors = [metrics[module_id][name].to(torch.float64) for module_id, name in names]
    fetched: dict[str, dict[str, float]] = {module_id: {} for module_id in metrics}
    for (module_id, name), value in zip(names, torch.stack(tensors).tolist(), strict=True):
        fetched[module_id][name] = value
    return fetched
