"""Metrics of several steps of the optimizer as those of one update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from juggler.learner.core.learner_core import Metrics


def mean_metrics(each: Sequence[Metrics]) -> Metrics:
    """Means over those that have a module, by its names in the first; computed on the device."""
    if len(each) == 1:
        return each[0]
    means: Metrics = {}
    for module_id in dict.fromkeys(module_id for metrics in each for module_id in metrics):
        own = [metrics[module_id] for metrics in each if module_id in metrics]
        values = [metrics[name].float() for metrics in own for name in own[0]]  # [] each
        mean = torch.stack(values).view(len(own), -1).mean(0)  # [names]
        means[module_id] = dict(zip(own[0], mean.unbind(), strict=True))
    return means
