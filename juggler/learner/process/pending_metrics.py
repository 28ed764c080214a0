"""Metrics of a module's updates that nobody has read yet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Updates in a row with gradients that are not finite, after which there is no hope.
_HOPELESS = 5
_METRICS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _OnTheirWay:
    """Means over some updates, and which of the updates were skipped."""

    names: list[str]  # of M metrics
    means: Tensor  # [M] on the host, once they are there
    skipped: Tensor  # [updates] on the host, once they are there
    there: Any  # the event behind their copies
    newest: int  # number of the last of these updates


class PendingMetrics:
    """Collects metrics on their device, and reads their means every now and then, once these have
    come to the host: nobody waits for the device."""

    def __init__(self, module_id: str) -> None:
        """Args:
        module_id: of the module, for errors.
        """
        self._module_id = module_id
        self._pending: list[Mapping[str, Tensor]] = []
        self._skipped_in_a_row = 0  # updates
        self._added = 0  # updates
        self._read_at = 0.0
        self._on_their_way: _OnTheirWay | None = None

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take the metrics of one more update, [] each."""
        self._pending.append(metrics)
        self._added += 1

    def take(self, update: int) -> dict[str, float]:
        """Means over the updates since the last means that were given out. They are empty where
        that was a moment ago, or where the new ones have not come yet.

        Args:
            update: number of the newest update.

        Raises:
            FloatingPointError: too many updates in a row had gradients that were not finite.
        """
        now = time.perf_counter()
        # A loss that is never finite is to end even a run of a few updates.
        due = now - self._read_at >= _METRICS_SECONDS or self._added <= 2 * _HOPELESS
        if self._on_their_way is None and self._pending and due:
            self._read_at = now
            pending, self._pending = self._pending, []
            self._on_their_way = _sent_to_host(pending, update)
        found = self._on_their_way
        if found is None or not found.there.query():
            return {}
        self._on_their_way = None
        self._notice_skips(found.skipped.tolist(), found.newest)
        return dict(zip(found.names, found.means.tolist(), strict=True))

    def _notice_skips(self, skipped: list[float], newest: int) -> None:
        for update, skip in enumerate(skipped, newest - len(skipped) + 1):
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if skip else 0
            if self._skipped_in_a_row >= _HOPELESS:
                raise FloatingPointError(
                    f"module {self._module_id!r}: the loss or its gradients were not finite in "
                    f"{_HOPELESS} updates in a row, the last of them update {update}. Lower lr, or "
                    "look at the scale of rewards; if no update ever worked, look at the loss"
                )


def _sent_to_host(pending: list[Mapping[str, Tensor]], newest: int) -> _OnTheirWay:
    def of_all(name: str) -> Tensor:
        """One metric of all these updates, [updates]."""
        return torch.stack([each[name].to(torch.float64) for each in pending])

    names = list(pending[-1])
    means = torch.stack([of_all(name).mean() for name in names])  # [M]
    skipped = of_all("skipped").to("cpu", non_blocking=True)  # [updates]
    on_host = means.to("cpu", non_blocking=True)  # [M]
    there = torch.get_device_module(means.device).Event()
    there.record()
    return _OnTheirWay(names, on_host, skipped, there, newest)
