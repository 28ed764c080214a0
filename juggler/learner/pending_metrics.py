"""Metrics of updates that nobody has read yet."""

from __future__ import annotations

import time

import torch

from juggler.learner.core import Metrics
from juggler.learner.learner import fetch_metrics

#: Updates in a row with gradients that are not finite, after which there is no hope.
_HOPELESS = 5
_METRICS_SECONDS = 0.5


class PendingMetrics:
    """Collects metrics on their device, and reads means of them every now and then: whoever reads
    one waits for the device."""

    def __init__(self) -> None:
        self._pending: list[Metrics] = []
        self._skipped_in_a_row: dict[str, int] = {}  # updates, by module id
        self._read_at = 0.0

    def add(self, metrics: Metrics) -> None:
        """Of an update."""
        self._pending.append(metrics)

    def take(self, update: int) -> dict[str, dict[str, float]]:
        """By module id, means over the updates since the last ones that were given out; nothing
        where that was a moment ago.

        Args:
            update: number of the newest of them.

        Raises:
            FloatingPointError: too many of them in a row had gradients that were not finite.
        """
        now = time.perf_counter()
        if not self._pending or now - self._read_at < _METRICS_SECONDS:
            return {}
        self._read_at = now
        pending, self._pending = self._pending, []
        means = {
            module_id: {
                name: torch.stack([each[module_id][name].float() for each in pending]).mean()  # []
                for name in names
            }
            for module_id, names in pending[-1].items()
        }
        for module_id in means:
            skipped = torch.stack([each[module_id]["skipped"] for each in pending])  # [updates]
            self._notice_skips(module_id, skipped.tolist(), update)
        return fetch_metrics(means)

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
