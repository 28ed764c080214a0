"""Batches that have arrived at a learner and wait for their update."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from juggler.learner.data.validation import BatchValidator
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Tree, flatten

Space = gymnasium.Space[Any]

_REMEMBERED = 4096  # batches that are here no more
_HALF_OF_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """One module's share of a batch, checked, with what its header said."""

    batch_id: int
    envrunner: str
    live_steps: int
    version: Version  # of the weights that acted
    modules: dict[str, EpisodeBatch]
    nbytes: int

    def staleness(self, update: int) -> int:
        """In updates, given the weights of one."""
        return max(0, update - self.version.update)


class BatchStore:
    """Takes batches in the server's thread; gives them to the learner's own.

    Args:
        spaces: (observation space, action space) of each module id that this learner trains.
        arrived: called for each batch that was taken, in the server's thread.
        capacity: batches held at most. Admission keeps a healthy run far below.
        capacity_bytes: that they may take.
        states: what a batch's `states` must be, by module id: trees of arrays of one row. Without
            one, batches of a module have none.

    Raises:
        UnsupportedSpace: nobody encodes one of the spaces.
    """

    def __init__(
        self,
        spaces: Mapping[str, tuple[Space, Space]],
        arrived: Callable[[HeldBatch], None],
        capacity: int = 65536,
        states: Mapping[str, Tree] | None = None,
        capacity_bytes: int = _HALF_OF_MEMORY,
    ) -> None:
        self._validators = {
            name: BatchValidator(name, *of_module, (states or {}).get(name, {}))
            for name, of_module in spaces.items()
        }
        self._arrived = arrived
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._held: dict[int, HeldBatch] = {}
        # Of batches taken lately, to refuse a replay. A dict would look for its oldest key behind
        # all those that were taken out before it.
        self._last_ids: OrderedDict[int, None] = OrderedDict()
        self._joined = 0  # the group's generation when this learner joined it
        self._lock = threading.Lock()

    def serve(self, joined: int) -> None:
        """Take batches meant for this generation of the group or a later one.

        One for an earlier generation was meant for a predecessor under the same worker id; one
        for a later generation may be here before this learner has heard of that.
        """
        with self._lock:
            self._joined = joined

    def take(self, frame: BatchFrame) -> str:
        """Why this batch came in vain, or "" where it was taken.

        Raises:
            WireError: no honest EnvRunner would have sent it.
        """
        header = frame.header
        held = HeldBatch(
            batch_id=header.batch_id,
            envrunner=header.envrunner,
            live_steps=header.live_steps,
            version=Version.of(header.version),
            modules=self._checked(frame),
            nbytes=sum(array.nbytes for _, array in flatten(frame.tree)),
        )
        with self._lock:
            if header.generation < self._joined:
                return (
                    f"batch {held.batch_id} is for generation {header.generation}, "
                    f"before {self._joined}"
                )
            self._must_be_welcome(held)
            self._held[held.batch_id] = held
            self._held_bytes += held.nbytes
            self._last_ids[held.batch_id] = None
            if len(self._last_ids) > _REMEMBERED:
                self._last_ids.popitem(last=False)
        self._arrived(held)
        return ""

    def peek(self, batch_ids: Iterable[int]) -> list[HeldBatch]:
        """Those of the batches named that are here, in that order; they stay."""
        with self._lock:
            return [self._held[batch_id] for batch_id in batch_ids if batch_id in self._held]

    def pop(self, batch_ids: Iterable[int]) -> tuple[list[HeldBatch], list[int]]:
        """(the batches named, in that order; the ids that are not here)."""
        with self._lock:
            found = [(batch_id, self._held.pop(batch_id, None)) for batch_id in batch_ids]
            self._held_bytes -= sum(held.nbytes for _, held in found if held)
        return [held for _, held in found if held], [key for key, held in found if held is None]

    def _must_be_welcome(self, batch: HeldBatch) -> None:
        if batch.batch_id in self._last_ids or batch.batch_id in self._held:
            raise WireError(f"batch {batch.batch_id} came before")
        if len(self._held) >= self._capacity:
            raise WireError(f"{len(self._held)} batches wait here already")
        if self._held_bytes + batch.nbytes > self._capacity_bytes:
            raise WireError(f"{self._held_bytes} bytes of batches wait here already")

    def _checked(self, frame: BatchFrame) -> dict[str, EpisodeBatch]:
        if not isinstance(frame.tree, dict) or not frame.tree:
            raise WireError("a batch must be a branch of modules")
        if unknown := frame.tree.keys() - self._validators.keys():
            raise WireError(
                f"unknown modules {sorted(unknown)}: expected {sorted(self._validators)}"
            )
        modules = {
            name: self._validators[name].checked(EpisodeBatch.from_tree(tree))
            for name, tree in frame.tree.items()
        }
        live = sum(batch.live_steps for batch in modules.values())
        if live != frame.header.live_steps:
            raise WireError(f"header says {frame.header.live_steps} live steps, found {live}")
        return modules
