"""Metrics of a module's updates, on their way from the device to the driver."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from juggler.learner.core.metrics import mean_metrics

#: After this many updates in a row without a step of the optimizer whose gradients are finite, the
#: module is hopeless.
_HOPELESS = 5
_METRICS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _OnTheirWay:
    """Copies under way: means over some updates, and how much of each of these was skipped."""

    names: list[str]  # of M metrics
    means: Tensor  # [M] on the host, once copied
    skipped: Tensor  # [updates] on the host, once copied: the share of its optimizer's steps
    there: Any  # the event after both copies
    newest: int  # the number of the last of these updates


class PendingMetrics:
    """Collects metrics on their device, and copies their means to the host twice a second. Nobody
    waits for the device.

    Attributes:
        hopeless: why more updates would change nothing; "": updates still help.
    """

    def __init__(self, module_id: str) -> None:
        """Args:
        module_id: id of the module, for messages.
        """
        self.hopeless = ""
        self._module_id = module_id
        self._pending: list[Mapping[str, Tensor]] = []
        self._skipped_in_a_row = 0  # updates
        self._added = 0  # updates
        self._read_at = 0.0
        self._on_their_way: _OnTheirWay | None = None

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the metrics of an update, [] each."""
        self._pending.append(metrics)
        self._added += 1

    def take(self, update: int) -> dict[str, float]:
        """Means over the updates since the last means that were returned. Empty if that was just
        now, or if the next ones have not arrived from the device yet.

        Args:
            update: the number of the newest update.
        """
        now = time.perf_counter()
        # The first updates are all read, so that a loss that is never finite ends even a short run.
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
        for update, share in enumerate(skipped, newest - len(skipped) + 1):
            # Where only some steps were skipped, the others have changed the weights.
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if share == 1 else 0
            if self._skipped_in_a_row >= _HOPELESS:
                self.hopeless = (
                    f"module {self._module_id!r}: the loss or its gradients were not finite in "
                    f"any step of {_HOPELESS} updates in a row, the last of them update {update}. "
                    "Lower lr, or check the scale of rewards; if no update ever worked, check the "
                    "loss"
                )


def _sent_to_host(pending: list[Mapping[str, Tensor]], newest: int) -> _OnTheirWay:
    found = mean_metrics(pending)
    means = torch.stack([x.double() for x in found.values()]) if found else torch.zeros(0)  # [M]
    none = means.new_zeros(())  # [] of a core that skips nothing, and has no such metric
    skipped = torch.stack([each.get("skipped", none) for each in pending])  # [updates]
    on_host = [x.to("cpu", non_blocking=True) for x in (means, skipped)]
    there = torch.get_device_module(means.device).Event()
    there.record()
    return _OnTheirWay(list(found), on_host[0], on_host[1], there, newest)
