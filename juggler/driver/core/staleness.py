"""How old steps may be when they are learned from, and who may use up how much of that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """The three numbers that a run's `max_staleness` means, in updates.

    Attributes:
        drop_after: a learner drops a batch that is older than this when its update comes.
        open_updates: how many updates' worth of batches may be open (see `Room`). Weights that act
            may be `weights_interval - 1` updates old to begin with. Of what is left, half is for
            the queue; the other half is slack for a runner that is held up while batches that were
            asked for later go before its own.
        row_age: gateways and EnvRunners with several agents hand in a row that is older than this
            before it is full, and drop a complete row that is twice as old. 0 in synchronous mode,
            where nothing is stale.
    """

    drop_after: int
    open_updates: int
    row_age: int

    @classmethod
    def of(cls, max_staleness: int, weights_interval: int, *, synchronous: bool) -> StalenessBudget:
        """
        Args:
            max_staleness: updates that weights may be behind when their steps are learned from.
            weights_interval: runners get the weights of every so many updates.
            synchronous: nothing is sampled while an update is made.
        """
        left = max_staleness - (weights_interval - 1)
        return cls(
            drop_after=max_staleness,
            open_updates=(left + 1) // 2,
            row_age=0 if synchronous else max(1, max_staleness // 2),
        )
