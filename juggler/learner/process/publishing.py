"""Publishes weights from a device while updates go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from juggler.learner.core.learner_core import Params
from juggler.learner.core.state import arrays_like, to_host
from juggler.learner.process.side_stream import SideStream
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree

#: Takes a version of weights, name -> array.
Publish = Callable[[Version, dict[str, Tree]], None]


class _Offer(NamedTuple):
    version: Version
    params: Params
    made: Any  # the event after the update that makes them


class Publishing:
    """Copies weights to the host and publishes them, in a thread and on a stream of its own.

    Versions are published in the order of the calls to `offer`. A version is skipped if a newer one
    is offered before its copy begins.
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
        """Publish weights soon; never waits.

        Args:
            version: newer than all versions before.
            params: the weights after all updates issued so far; nobody changes them.

        Raises:
            Exception: an earlier version could not be published.
        """
        if self._failure is not None:
            raise self._failure
        made = self._side.mark()
        with self._condition:
            self._newest = _Offer(version, params, made)
            self._condition.notify()

    def close(self) -> None:
        """End the thread. Weights that it has not begun to copy are not published."""
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
        # `offer` keeps the tensors alive until here, where their copy is done.
        self._publish(offer.version, arrays_like(on_host))
