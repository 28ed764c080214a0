"""Metrics of updates that nobody has read yet."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Metrics

#: Updates in a row with gradients that are not finite, after which there is no hope.
_HOPELESS = 5
_METRICS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _OnTheirWay:
    """Means over some updates, and what each of them skipped."""

    names: list[tuple[str, str]]  # module id, metric
    means: Tensor  # [M] on the host, once they are there
    skipped: dict[str, Tensor]  # [updates] by module id, the same
    there: Any  # the event behind their copies
    newest: int  # number of the last of these updates


class PendingMetrics:
    """Collects metrics on their device, and reads means of them every now and then, when they have
    come to the host: nobody waits for the device."""

    def __init__(self) -> None:
        self._pending: list[Metrics] = []
        self._skipped_in_a_row: dict[str, int] = {}  # updates, by module id
        self._read_at = 0.0
        self._on_their_way: _OnTheirWay | None = None

    def add(self, metrics: Metrics) -> None:
        """Of an update."""
        self._pending.append(metrics)

    def take(self, update: int) -> dict[str, dict[str, float]]:
        """By module id, means over the updates since the last ones that were given out; nothing
        where that was a moment ago, or they have not come yet.

        Args:
            update: number of the newest of them.

        Raises:
            FloatingPointError: too many of them in a row had gradients that were not finite.
        """
        now = time.perf_counter()
        if self._on_their_way is None and self._pending and now - self._read_at >= _METRICS_SECONDS:
            self._read_at = now
            pending, self._pending = self._pending, []
            self._on_their_way = _sent_to_host(pending, update)
        found = self._on_their_way
        if found is None or not found.there.query():
            return {}
        self._on_their_way = None
        for module_id, skipped in found.skipped.items():
            self._notice_skips(module_id, skipped.tolist(), found.newest)
        means: dict[str, dict[str, float]] = {module_id: {} for module_id, _ in found.names}
        for (module_id, name), mean in zip(found.names, found.means.tolist(), strict=True):
            means[module_id][name] = mean
        return means

    def _notice_skips(self, module_id: str, skipped: list[float], newest: int) -> None:
        """Of each of the newest updates."""
        for update, skip in enumerate(skipped, newest - len(skipped) + 1):
            in_a_row = self._skipped_in_a_row.get(module_id, 0) + 1 if skip else 0
            self._skipped_in_a_row[module_id] = in_a_row
            if in_a_row >= _HOPELESS:
                raise FloatingPointError(
                    f"module {module_id!r}: the loss or its gradients were not finite in "
                    f"{_HOPELESS} updates in a row, the last of them update {update}. Lower lr, or "
                    "look at the rewards' scale"
                )


def _sent_to_host(pending: list[Metrics], newest: int) -> _OnTheirWay:
    names = [(module_id, name) for module_id, values in pending[-1].items() for name in values]
    means = torch.stack([_all(pending, *key).mean() for key in names])  # [M]
    skipped = {
        module_id: _all(pending, module_id, "skipped").to("cpu", non_blocking=True)  # [updates]
        for module_id in pending[-1]
    }
    on_host = means.to("cpu", non_blocking=True)  # [M]
    there = torch.get_device_module(means.device).Event()
    there.record()
    return _OnTheirWay(names, on_host, skipped, there, newest)


def _all(pending: list[Metrics], module_id: str, name: str) -> Tensor:
    """One metric of all these updates, [updates]."""
    return torch.stack([each[module_id][name].to(torch.float64) for each in pending])
