"""The driver's books of one module: the fate of every environment step.

A batch is requested, then held by its learner, then part of an update, then closed: trained or
dropped. A step is sampled when its batch is first reported, by its runner or by its learner. At
all times

    sampled = trained + dropped + in flight

where in flight is the sum over the batches that are reported and not closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from juggler.driver.core.events import DROP_REASONS, UsedBatch, WorkerKey

#: Counts in checkpoints have the same range.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_MOST_UNREPORTED = 1 << 16  # batches whose runners died


class LedgerError(RuntimeError):
    """The books do not balance: a bug, or modified counters."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """One open batch."""

    batch_id: int
    runner: WorkerKey
    learner: WorkerKey  # the incarnation that the request was for
    steps: int  # the request's size until the batch is reported; then its live steps
    round: int = 0  # number of the round that the request belongs to


@dataclass(frozen=True, slots=True)
class Counters:
    """The books at one moment, in live steps, as in metrics."""

    sampled: Count
    trained: Count
    dropped: Mapping[Literal[*DROP_REASONS], Count]  # type: ignore[valid-type]
    in_flight: Count
    lost_unreported: Count  # requested from runners that died before any report; not sampled

    @classmethod
    def sum(cls, books: Iterable[Counters]) -> Counters:
        """Add up the books of several modules."""
        each = list(books)
        dropped = {reason: sum(b.dropped.get(reason, 0) for b in each) for reason in DROP_REASONS}
        return cls(
            sum(b.sampled for b in each),
            sum(b.trained for b in each),
            dropped,
            sum(b.in_flight for b in each),
            sum(b.lost_unreported for b in each),
        )

    def check(self) -> None:
        """Check that every sampled step is trained, dropped or in flight."""
        if self.sampled != self.trained + sum(self.dropped.values()) + self.in_flight:
            raise LedgerError(
                f"{self.sampled} steps sampled, but {self.trained} trained + "
                f"{sum(self.dropped.values())} dropped + {self.in_flight} in flight"
            )


class Ledger:
    """Counts the steps of one module, and keeps its open batches.

    An open batch is in one of three states.
    """

    def __init__(self) -> None:
        self.requested: dict[int, OpenBatch] = {}  # not reported yet
        self.held: dict[int, OpenBatch] = {}  # waiting at its learner
        self.updating: dict[int, OpenBatch] = {}  # in an issued update
        # Closed because their runner died; a learner may have received some.
        self.unreported: dict[int, OpenBatch] = {}
        self.sampled = 0
        self.trained = 0
        self.dropped = dict.fromkeys(DROP_REASONS, 0)
        self.lost_unreported = 0

    @classmethod
    def restore(cls, counters: Counters) -> Ledger:
        """Continue the books of a checkpoint; steps in flight are lost.

        Raises:
            LedgerError: the counters do not balance.
        """
        counters.check()
        ledger = cls()
        ledger.sampled = counters.sampled
        ledger.trained = counters.trained
        ledger.dropped.update(counters.dropped)
        ledger.dropped["restart"] += counters.in_flight
        ledger.lost_unreported = counters.lost_unreported
        return ledger

    def request(self, batch: OpenBatch) -> None:
        """Open a batch: its request went out."""
        self.requested[batch.batch_id] = batch

    def hold(self, batch: OpenBatch, live_steps: int) -> None:
        """Book the first report of a requested batch: its steps are sampled."""
        del self.requested[batch.batch_id]
        self.held[batch.batch_id] = batch
        batch.steps = live_steps
        self.sampled += live_steps

    def drop_unbatched(self, steps: int) -> None:
        """Book sampled steps that are too old for any batch."""
        self.sampled += steps
        self.dropped["stale"] += steps

    def use(self, batch: OpenBatch) -> None:
        """Move a held batch into an update."""
        self.updating[batch.batch_id] = self.held.pop(batch.batch_id)

    def train(self, batch: OpenBatch) -> None:
        """Close a batch of an update as trained."""
        del self.updating[batch.batch_id]
        self.trained += batch.steps

    def drop(self, batch: OpenBatch, reason: str) -> None:
        """Close a reported batch: its steps will never be trained on."""
        if self.held.pop(batch.batch_id, None) is None:
            del self.updating[batch.batch_id]
        self.dropped[reason] += batch.steps

    def reopen(self, batch: OpenBatch, reason: str) -> None:
        """Undo `drop` in an update, because its learner is back.

        The learner will report the fate of the batch.
        """
        self.updating[batch.batch_id] = batch
        self.dropped[reason] -= batch.steps

    def settle(self, share: Iterable[OpenBatch], used: Iterable[UsedBatch]) -> None:
        """Close a learner's share of an update according to its answer."""
        answers = {answer.batch_id: answer for answer in used}
        for batch in share:
            answer = answers.get(batch.batch_id)
            if answer is None:
                self.drop(batch, "restart")  # the learner no longer knows it
            elif answer.dropped:
                self.drop(batch, answer.dropped)
            else:
                self.train(batch)

    def cancel(self, batch: OpenBatch) -> None:
        """Close a requested batch that brought no steps."""
        del self.requested[batch.batch_id]

    def lose(self, batch: OpenBatch) -> None:
        """Close a requested batch whose runner died; its steps are unknown."""
        del self.requested[batch.batch_id]
        self.unreported[batch.batch_id] = batch
        if len(self.unreported) > _MOST_UNREPORTED:  # the oldest will not turn up again
            del self.unreported[next(iter(self.unreported))]
        self.lost_unreported += batch.steps

    def revive(self, batch_id: int) -> OpenBatch | None:
        """Undo `lose`: the learner has the batch. None: it was not lost."""
        batch = self.unreported.pop(batch_id, None)
        if batch is not None:
            self.lost_unreported -= batch.steps
            self.requested[batch_id] = batch
        return batch

    def finish(self) -> None:
        """Close everything: held batches are dropped, requests are forgotten."""
        for batch in [*self.held.values(), *self.updating.values()]:
            self.drop(batch, "shutdown")
        self.requested.clear()

    @property
    def in_flight(self) -> int:
        """Number of steps that were reported, and neither trained on nor dropped."""
        return sum(batch.steps for batch in self.held.values()) + sum(
            batch.steps for batch in self.updating.values()
        )

    def counters(self) -> Counters:
        return Counters(
            self.sampled, self.trained, dict(self.dropped), self.in_flight, self.lost_unreported
        )

    def check(self) -> None:
        """Raise a LedgerError unless each step is in one place."""
        self.counters().check()
