"""Weights on their way from the device to a publisher, beside updates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from juggler.learner.core.learner_core import Params
from juggler.learner.core.state import arrays_like, to_host
from juggler.learner.process.side_stream import SideStream
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree

#: Takes a version of weights, name -> array by module id.
Publish = Callable[[Version, dict[str, Tree]], None]


class _Offer(NamedTuple):
    version: Version
    params: Params
    made: Any  # the event behind the update that makes them


class Publishing:
    """Copies weights to the host and publishes them, in a thread and on a stream of its own.

    Versions come out in the order they are offered in; those that a newer one overtakes on its way
    are left out.
    """

    def __init__(self, publish: Publish, side: SideStream) -> None:
        self._publish = publish
        self._side = side
        self._condition = threading.Condition()
        self._newest: _Offer | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._thread.start()

    def offer(self, version: Version, params: Params) -> None:
        """Have weights published; never waits.

        Args:
            version: newer than all that were offered before.
            params: as the updates make them that were begun so far; nobody changes them.

        Raises:
            Exception: of an earlier version that could not be published.
        """
        if self._failure is not None:
            raise self._failure
        made = self._side.mark()
        with self._condition:
            self._newest = _Offer(version, params, made)
            self._condition.notify()

    def close(self) -> None:
        """End the thread; what it has not begun with is not published."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        try:
            self._side.enter_thread()
            while (offer := self._next()) is not None:
                self._give_out(offer)
        except BaseException as error:
            self._failure = error

    def _next(self) -> _Offer | None:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._newest is not None)
            offer, self._newest = self._newest, None
            return None if self._closed else offer

    def _give_out(self, offer: _Offer) -> None:
        with self._side.working(after=offer.made):
            on_host = to_host(offer.params)
            copied = self._side.mark()
        copied.synchronize()
        # Until here `offer` has kept the memory that was copied from what it was.
        self._publish(offer.version, arrays_like(on_host))
