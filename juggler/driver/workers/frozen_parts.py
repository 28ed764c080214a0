"""Sends EnvRunners what modules play with that are not trained, before their Setup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from google.protobuf.message import Message

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import restores
from juggler.runtime.actors.hub_events import Worker


class FrozenParts:
    """Each worker gets the next part when it has the one before, so that few are on their way.

    Args:
        frozen: by module id.
    """

    def __init__(self, frozen: Mapping[str, FrozenModule]) -> None:
        self._frozen = frozen
        self._parts: list[Message] = []  # the same for all
        self._to_send: dict[Worker, Iterator[Message]] = {}

    def first(self, worker: Worker, setup: Message) -> Message:
        """What to send a worker that is to be set up: its first part, or else its setup."""
        if not self._parts:
            modules = self._frozen.items()
            self._parts = [
                part
                for module_id, module in modules
                for part in restores(module_id, module.tree, {})
            ]
        self._to_send[worker] = chain(self._parts, [setup])
        return next(self._to_send[worker])

    def next(self, worker: Worker) -> Message | None:
        """What to send a worker that has a part; None: it has all of them, and its setup."""
        return next(self._to_send.get(worker, iter(())), None)

    def left(self, worker: Worker) -> None:
        self._to_send.pop(worker, None)
