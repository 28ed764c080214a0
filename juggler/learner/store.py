"""Batches that have arrived at a learner and wait for their update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from juggler.learner.fit import BatchFit
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.stream import BatchFrame
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Tree

Space = gymnasium.Space[Any]


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """One module's share of a batch, checked, with what its header said."""

    batch_id: int
    envrunner: str
    live_steps: int
    version: Version  # of the weights that acted
    modules: dict[str, EpisodeBatch]


class BatchStore:
    """Takes batches from the streams' threads; gives them to the learner's own.

    Args:
        spaces: (observation space, action space) of each module id that this learner trains.
        arrived: called for each batch that was taken, in a stream's thread.
        capacity: batches held at most. Admission keeps a healthy run far below.
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
    ) -> None:
        self._fits = {
            name: BatchFit(name, *of_module, (states or {}).get(name, {}))
            for name, of_module in spaces.items()
        }
        self._arrived = arrived
        self._capacity = capacity
        self._held: dict[int, HeldBatch] = {}
        self._last_ids: dict[int, None] = {}  # of batches taken lately, to refuse a replay
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
        """The reason to refuse this batch, or "" where it was taken."""
        header = frame.header
        try:
            held = HeldBatch(
                batch_id=header.batch_id,
                envrunner=header.envrunner,
                live_steps=header.live_steps,
                version=Version.of(header.version),
                modules=self._checked(frame),
            )
        except WireError as error:
            return str(error)
        with self._lock:
            if refusal := self._why_not(held.batch_id, header.generation):
                return refusal
            self._held[held.batch_id] = held
            self._last_ids[held.batch_id] = None
            if len(self._last_ids) > self._capacity:
                del self._last_ids[next(iter(self._last_ids))]
        self._arrived(held)
        return ""

    def pop(self, batch_ids: Iterable[int]) -> tuple[list[HeldBatch], list[int]]:
        """(the batches named, in that order; the ids that are not here)."""
        with self._lock:
            found = [(batch_id, self._held.pop(batch_id, None)) for batch_id in batch_ids]
        return [held for _, held in found if held], [key for key, held in found if held is None]

    def _why_not(self, batch_id: int, generation: int) -> str:
        if generation < self._joined:
            return f"batch {batch_id} is for generation {generation}, before {self._joined}"
        if batch_id in self._last_ids:
            return f"batch {batch_id} came before"
        if len(self._held) >= self._capacity:
            return f"{len(self._held)} batches wait here already"
        return ""

    def _checked(self, frame: BatchFrame) -> dict[str, EpisodeBatch]:
        if not isinstance(frame.tree, dict) or not frame.tree:
            raise WireError("a batch must be a branch of modules")
        if unknown := frame.tree.keys() - self._fits.keys():
            raise WireError(f"unknown modules {sorted(unknown)}: expected {sorted(self._fits)}")
        modules = {
            name: self._fits[name].checked(EpisodeBatch.from_tree(tree))
            for name, tree in frame.tree.items()
        }
        live = sum(batch.live_steps for batch in modules.values())
        if live != frame.header.live_steps:
            raise WireError(f"header says {frame.header.live_steps} live steps, found {live}")
        return modules
