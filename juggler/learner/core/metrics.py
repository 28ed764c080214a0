"""Metrics: means over several optimizer steps, and conversion to plain numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Metrics


def mean_metrics(each: Sequence[Metrics]) -> Metrics:
    """Each module's means over the entries that have the name, computed on the device."""
    if len(each) == 1:
        return each[0]
    ids = dict.fromkeys(module_id for metrics in each for module_id in metrics)
    return {
        module_id: means_of(metrics[module_id] for metrics in each if module_id in metrics)
        for module_id in ids
    }


def means_of(each: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means of a module's numbers [] over the entries that have the name, on their device."""
    values = defaultdict[str, list[Tensor]](list)
    for numbers in each:
        for name, value in numbers.items():
            values[name].append(value)
    return {name: torch.stack(x).double().mean() for name, x in values.items()}


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
    fetched: dict[str, dict[str, float]] = {module_id: {} for module_id in metrics}
    if not names:
        return fetched
    tensors = [metrics[module_id][name].to(torch.float64) for module_id, name in names]
    for (module_id, name), value in zip(names, torch.stack(tensors).tolist(), strict=True):
        fetched[module_id][name] = value
    return fetched
