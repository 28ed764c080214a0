"""The order in which a driver hears what workers say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub_events import HubEvent, Left, Replied
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.wire.v1 import training_pb2


class ReceiptsFirst:
    """In synchronous mode, an update's receipts are heard before the learner's answer to it.

    Receipts tell which episodes ended and what connectors have learned, and the requests that
    follow the update pass that on: nothing of it may depend on who is faster. Every receipt that is
    missing comes soon, since the learner has what it is for, or its EnvRunner leaves.

    Args:
        pool: where requests are in flight.
        synchronous: else everything is heard as it comes.
    """

    def __init__(self, pool: RequestPool, synchronous: bool) -> None:
        self._pool = pool
        self._synchronous = synchronous
        self._early: deque[HubEvent] = deque()  # an answer, and what the learner said after it

    def in_order(self, event: HubEvent) -> Iterator[HubEvent]:
        """What is to be heard now that this event has come; the pool is to know of each of them
        before the next is asked for."""
        if self._synchronous and event.worker.role == LEARNER:
            if isinstance(event, Left):  # nobody can wait for it any more
                yield from self._early
                self._early.clear()
            elif self._early or self._comes_early(event):
                self._early.append(event)
                return
        yield event
        while self._early and not self._pool.has_in_flight(training_pb2.SampleRequest):
            yield self._early.popleft()

    def _comes_early(self, event: HubEvent) -> bool:
        return (
            isinstance(event, Replied)
            and isinstance(self._pool.asked(event), training_pb2.Update)
            and self._pool.has_in_flight(training_pb2.SampleRequest)
        )
