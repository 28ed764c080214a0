"""EnvRunners whose steps come too late to be learned from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from juggler.driver.core.events import UsedBatch
from juggler.driver.core.ledger import Batch

_FEWEST = 5  # stale batches that say anything
_MOST = 80  # batches behind which older ones count for half
_MUCH = 0.2  # of the steps of one EnvRunner
_CHANGE = 0.3


@dataclass(slots=True)
class _Lately:
    """Of one EnvRunner, over its last batches."""

    batches: float = 0.0
    stale_batches: float = 0.0
    steps: float = 0.0
    stale: float = 0.0
    said: float | None = None  # the share that people were told last


class StaleRunners:
    """Whom to tell people of, because much of what it samples is dropped as stale.

    Args:
        max_staleness: of the module.
        module_id: names the module to people; "": the run has no other.
    """

    def __init__(self, max_staleness: int, module_id: str = "") -> None:
        self._max_staleness = max_staleness
        self._of_module = f" for module {module_id}" if module_id else ""
        self._lately: dict[str, _Lately] = {}  # by worker id

    def answered(self, used: Iterable[UsedBatch], updating: Mapping[int, Batch]) -> None:
        """A learner's answer to an update, which the books have not taken yet."""
        for each in used:
            if (batch := updating.get(each.batch_id)) is not None:
                stale = batch.steps if each.dropped == "stale" else 0
                self._count(batch.runner.worker_id, batch.steps, stale)

    def brought(self, worker_id: str, stale_steps: int) -> None:
        """A gateway's receipt: beside its batch, so many steps were too old to be in any."""
        if stale_steps:
            self._count(worker_id, stale_steps, stale_steps)

    def _count(self, worker_id: str, steps: int, stale: int) -> None:
        lately = self._lately.setdefault(worker_id, _Lately())
        lately.batches, lately.steps = lately.batches + 1, lately.steps + steps
        lately.stale += stale
        lately.stale_batches += stale > 0
        if lately.batches >= _MOST:
            lately.batches, lately.steps = lately.batches / 2, lately.steps / 2
            lately.stale, lately.stale_batches = lately.stale / 2, lately.stale_batches / 2

    def left(self, worker_id: str) -> None:
        self._lately.pop(worker_id, None)

    def look(self) -> list[str]:
        """For people: of each EnvRunner whose share is much, or another than was said."""
        texts = []
        for worker_id, lately in self._lately.items():
            share, said = lately.stale / max(1.0, lately.steps), lately.said
            if said is None:
                due = lately.stale_batches >= _FEWEST and share >= _MUCH
            else:
                due = abs(share - said) >= _CHANGE
            if due:
                lately.said = share
                texts.append(self._text(worker_id, share))
        return texts

    def _text(self, worker_id: str, share: float) -> str:
        dropped = (
            f"{share:.0%} of what {worker_id} sampled lately{self._of_module} was dropped as stale"
        )
        if share < _MUCH:
            return f"{dropped}: it is fast enough again"
        return (
            f"{dropped}: more than max_staleness = {self._max_staleness} updates were made while "
            "it sampled. Raise max_staleness, or give it fewer environments or a faster host"
        )
