"""The batches that wait at a learner for an update."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from juggler.learner.data.validation import BatchValidator
from juggler.runtime.actors.resources import total_memory
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Tree, flatten

Space = gymnasium.Space[Any]

_REMEMBERED = 4096  # ids of batches that were taken lately


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """One module's part of a validated batch, with fields of its header."""

    batch_id: int
    envrunner: str
    live_steps: int
    version: Version  # of the weights that acted
    modules: dict[str, EpisodeBatch]
    nbytes: int

    def staleness(self, update: int) -> int:
        """How many updates older it is than the weights of an update."""
        return max(0, update - self.version.update)


class BatchStore:
    """Takes batches in the server's thread, and gives them to the learner's thread.

    Args:
        spaces: by id of the modules that this learner trains, (observation space, action space).
        arrived: called for each batch that was taken, in the server's thread.
        capacity: the largest number of batches. Admission keeps a healthy run far below it.
        capacity_bytes: the most memory that batches may take; None: half of the
            memory that this process may use.
        critic_spaces: by module id, of what its value function sees beside observations; batches
            of modules without an entry have none of it.
        states: by module id, the expected `states` of one row, as trees of arrays; batches of
            modules without an entry must have none.

    Raises:
        UnsupportedSpace: Juggler cannot encode one of the spaces.
    """

    def __init__(
        self,
        spaces: Mapping[str, tuple[Space, Space]],
        arrived: Callable[[HeldBatch], None],
        capacity: int = 65536,
        states: Mapping[str, Tree] | None = None,
        capacity_bytes: int | None = None,
        critic_spaces: Mapping[str, Space] | None = None,
    ) -> None:
        critics = critic_spaces or {}
        self._validators = {
            name: BatchValidator(name, *of_module, (states or {}).get(name, {}), critics.get(name))
            for name, of_module in spaces.items()
        }
        self._arrived = arrived
        self._capacity = capacity
        self._capacity_bytes = total_memory() // 2 if capacity_bytes is None else capacity_bytes
        self._held_bytes = 0
        self._held: dict[int, HeldBatch] = {}
        # Of batches taken lately, to refuse a replay. In a dict, finding the oldest key would mean
        # passing over all that were removed before it.
        self._last_ids: OrderedDict[int, None] = OrderedDict()
        self._joined = 0  # the generation of the group when this learner joined it
        self._lock = threading.Lock()

    def serve(self, joined: int) -> None:
        """Take batches for this generation of the group and later ones.

        A batch for an earlier generation was meant for a predecessor with the same worker id. A
        batch for a later one may arrive before this learner has heard of that generation.
        """
        with self._lock:
            self._joined = joined

    def take(self, frame: BatchFrame) -> str:
        """Take a batch. Returns why it was refused; "" if it was taken.

        Raises:
            WireError: the batch is invalid; no correct EnvRunner sends such a batch.
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
        """The named batches that are here, in that order; they stay in the store."""
        with self._lock:
            return [self._held[batch_id] for batch_id in batch_ids if batch_id in self._held]

    def pop(self, batch_ids: Iterable[int]) -> tuple[list[HeldBatch], list[int]]:
        """Remove batches. Returns (those that are here, in that order; the ids of the others)."""
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
