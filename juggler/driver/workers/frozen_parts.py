"""Sends EnvRunners what modules play with that are not trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from google.protobuf.message import Message

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import restores
from juggler.runtime.actors.hub_events import Worker


class FrozenParts:
    """Each worker gets the next part when it has the one before, so that few are on their way.

    What comes before its Setup is followed by that, and then by what came up meanwhile.

    Args:
        frozen: by module id; of a league it changes.
    """

    def __init__(self, frozen: Mapping[str, FrozenModule]) -> None:
        self._frozen = frozen
        self._to_send: dict[Worker, deque[Iterator[Message]]] = {}
        self._on_its_way: set[Worker] = set()  # those who have not answered to the last part

    def first(self, worker: Worker, setup: Message) -> Message:
        """What to send a worker that is to be set up: its first part, or else its setup."""
        parts = (
            part
            for module_id, module in list(self._frozen.items())
            for part in restores(module_id, module.tree, {})
        )
        self._to_send[worker] = deque([parts, iter([setup])])
        self._on_its_way.add(worker)
        first = self.next(worker)
        assert first is not None  # the setup at least
        return first

    def append(
        self, worker: Worker, messages: Iterable[Message], send: Callable[[Worker, Message], None]
    ) -> None:
        """Send a worker something behind all of that."""
        self._to_send.setdefault(worker, deque()).append(iter(messages))
        if worker not in self._on_its_way and (message := self.next(worker)) is not None:
            send(worker, message)

    def next(self, worker: Worker) -> Message | None:
        """What to send a worker that has a part; None: it has all of them."""
        queue = self._to_send.get(worker, deque())
        while queue:
            if (message := next(queue[0], None)) is not None:
                self._on_its_way.add(worker)
                return message
            queue.popleft()
        self._on_its_way.discard(worker)
        return None

    def left(self, worker: Worker) -> None:
        self._to_send.pop(worker, None)
        self._on_its_way.discard(worker)
