"""What became of the batches of a module's updates."""

from __future__ import annotations

from collections.abc import Iterable

from juggler.learner.data.batch_store import HeldBatch
from juggler.runtime.wire.v1 import training_pb2


class BatchBooks:
    """Tells the driver what became of each batch, and counts steps.

    Attributes:
        steps_trained: live steps of batches that were learned from, or that a replay keeps for it.
        steps_dropped: live steps of all others.
    """

    def __init__(self, max_staleness: int) -> None:
        """Args:
        max_staleness: the most updates that a batch may be older than the weights of its update.
        """
        self._max_staleness = max_staleness
        self.steps_trained = 0
        self.steps_dropped = 0

    def settle(
        self,
        done: training_pb2.UpdateDone,
        batches: Iterable[HeldBatch],
        missing: Iterable[int],
        update: int,
        is_kept: bool,
    ) -> None:
        """Book the batches of an update.

        Args:
            done: the answer, which gets an entry for each batch.
            batches: those that were here.
            missing: the ids of those that were not.
            update: the number of the weights that the update started from.
            is_kept: they are in a replay, and are learned from even if this update has failed.
        """
        for batch in batches:
            staleness = batch.staleness(update)
            used = done.batches.add(
                batch_id=batch.batch_id, live_steps=batch.live_steps, staleness=staleness
            )
            if staleness > self._max_staleness:
                used.dropped = "stale"
            elif done.peer_lost and not is_kept:
                used.dropped = "learner_lost"
            if used.dropped:
                self.steps_dropped += batch.live_steps
            else:
                self.steps_trained += batch.live_steps
        for batch_id in missing:
            done.batches.add(batch_id=batch_id, dropped="restart")

    def settle_exact(self, done: training_pb2.UpdateDone, batches: Iterable[HeldBatch]) -> None:
        """Book the batches of an exact update, which has learned from all of them."""
        for batch in batches:
            done.batches.add(batch_id=batch.batch_id, live_steps=batch.live_steps)
            self.steps_trained += batch.live_steps

    def drop(self, batches: Iterable[HeldBatch]) -> None:
        """Book batches that no update will learn from."""
        self.steps_dropped += sum(batch.live_steps for batch in batches)
