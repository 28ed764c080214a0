"""How old steps may become, and how many batches may be open."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Limits the open batches of a module.

    No batch waits for more than `updates` updates.

    An update takes whole batches of each learner: at least one, and at least the learner's share
    of batch_size. So several small batches make one update, and each batch of a share or more makes
    one.

    Attributes:
        updates: number of updates for which batches may be open at once.
        batch_size: live steps in one update, over all learners.
        learners: number of learners that make each update together.
    """

    updates: int
    batch_size: int
    learners: int = 1

    def is_left(self, batches: int, steps: int) -> bool:
        """Whether one more batch may be requested for a learner.

        It has `batches` open batches, with `steps` live steps in total.
        """
        return batches < self.updates or steps * self.learners < self.updates * self.batch_size

    def batches(self, steps: int) -> int:
        """Number of batches of `steps` steps that may be open."""
        most = range(self.updates * self.batch_size)  # for one learner, if each batch had one step
        return self.learners * bisect_left(
            most, True, key=lambda open_: not self.is_left(open_, open_ * steps)
        )


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """The three numbers that a run's `max_staleness` means, in updates.

    Attributes:
        drop_after: a learner drops a batch that is older than this when its update comes.
        open_updates: how many updates' worth of batches may be open (see `Room`). Weights that act
            may already be `weights_interval - 1` updates old. Of the rest, half is for the queue;
            the other half is slack for a slow runner whose batch is overtaken by batches requested
            later.
        row_age: gateways and EnvRunners with several agents hand in a row that is older than this
            before it is full, and drop a complete row that is twice as old. 0 in synchronous mode,
            in which nothing is stale.
    """

    drop_after: int
    open_updates: int
    row_age: int

    @classmethod
    def of(cls, max_staleness: int, weights_interval: int, *, synchronous: bool) -> StalenessBudget:
        """Divide `max_staleness` into the three limits.

        Args:
            max_staleness: updates that weights may be behind when their steps are learned from.
            weights_interval: runners receive the weights of every Nth update.
            synchronous: nothing is sampled while an update is made.
        """
        left = max_staleness - (weights_interval - 1)
        return cls(
            drop_after=max_staleness,
            open_updates=(left + 1) // 2,
            row_age=0 if synchronous else max(1, max_staleness // 2),
        )
