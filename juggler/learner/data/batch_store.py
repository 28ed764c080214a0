"""Storage of batches that wait at a learner for an update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from juggler.learner.data.validation import BatchValidator
from juggler.runtime.actors.resources import total_memory
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import flatten


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A validated batch, with fields of its header."""

    batch_id: int
    envrunner: str
    live_steps: int
    version: Version  # of the weights that acted
    episodes: EpisodeBatch
    nbytes: int

    def staleness(self, update: int) -> int:
        """Return the number of updates between the batch's weights and an update's."""
        return max(0, update - self.version.update)


class BatchStore:
    """Holds batches between the server's thread and the learner's.

    Args:
        validator: validator of batches of the trained module.
        arrived: called for each accepted batch, in the server's thread.
        capacity_bytes: maximum memory of batches, including other modules of the process; admission
            keeps a healthy run far below. None: half of the memory that this process may use.

    Attributes:
        held_bytes: memory of the waiting batches.
    """

    def __init__(
        self,
        validator: BatchValidator,
        arrived: Callable[[HeldBatch], None],
        capacity_bytes: int | None = None,
    ) -> None:
        self._validator = validator
        self._arrived = arrived
        self._capacity_bytes = total_memory() // 2 if capacity_bytes is None else capacity_bytes
        self.held_bytes = 0
        self._held: dict[int, HeldBatch] = {}
        self._refused: dict[int, str] = {}  # why, by batch id, for `take`
        self._joined = 0  # the generation of the group when this learner joined it
        self._lock = threading.Condition()

    def serve(self, joined: int) -> None:
        """Accept batches for this generation of the group and later ones.

        A batch for an earlier generation was meant for a predecessor with the same worker id. A
        batch for a later generation may arrive before this learner is notified of it.
        """
        with self._lock:
            self._joined = joined

    def insert(self, frame: BatchFrame, elsewhere: int = 0) -> str:
        """Store a batch; return why it was refused, or "".

        Args:
            frame: the batch.
            elsewhere: bytes of batches that wait for other modules of this process.

        Raises:
            WireError: the batch is invalid; a correct EnvRunner never sends it.
        """
        header = frame.header
        held = HeldBatch(
            batch_id=header.batch_id,
            envrunner=header.envrunner,
            live_steps=header.live_steps,
            version=Version.of(header.version),
            episodes=self._checked(frame),
            nbytes=sum(array.nbytes for _, array in flatten(frame.tree)),
        )
        with self._lock:
            if header.generation < self._joined:
                return (
                    f"batch {held.batch_id} is for generation {header.generation}, "
                    f"before {self._joined}"
                )
            # The driver requests each id once. Only batches that still wait here are recognized.
            if held.batch_id in self._held:
                raise WireError(f"batch {held.batch_id} is already here")
            waiting = self.held_bytes + elsewhere
            if waiting + held.nbytes > self._capacity_bytes:
                raise WireError(f"{waiting} bytes of batches are waiting already")
            self._held[held.batch_id] = held
            self.held_bytes += held.nbytes
            self._lock.notify_all()
        self._arrived(held)
        return ""

    def refuse(self, batch_id: int, why: str) -> None:
        """Note for `take` that a batch was refused."""
        with self._lock:
            self._refused[batch_id] = why
            self._lock.notify_all()

    def peek(self, batch_ids: Iterable[int]) -> list[HeldBatch]:
        """Return the named batches that have arrived, in order, without removal."""
        with self._lock:
            return [self._held[batch_id] for batch_id in batch_ids if batch_id in self._held]

    def pop(self, batch_ids: Iterable[int]) -> tuple[list[HeldBatch], list[int]]:
        """Remove and return the named batches in order, and missing ids."""
        with self._lock:
            found = [(batch_id, self._held.pop(batch_id, None)) for batch_id in batch_ids]
            self.held_bytes -= sum(held.nbytes for _, held in found if held)
        return [held for _, held in found if held], [key for key, held in found if held is None]

    def take(self, batch_ids: Sequence[int]) -> list[HeldBatch]:
        """Wait for all of these batches; remove and return them.

        A learner that waits for longer than the hub's `hang_seconds` is ended from there.

        Raises:
            ValueError: one was refused; the others are removed.
        """
        with self._lock:
            self._lock.wait_for(
                lambda: all(key in self._held or key in self._refused for key in batch_ids)
            )
            refused = [self._refused.pop(key) for key in batch_ids if key in self._refused]
            held, _missing = self.pop(batch_ids)
        if refused:
            raise ValueError(refused[0])
        return held

    def _checked(self, frame: BatchFrame) -> EpisodeBatch:
        module = self._validator.module
        if not isinstance(frame.tree, dict) or not frame.tree:
            raise WireError("a batch must be a branch of modules")
        if unknown := frame.tree.keys() - {module}:
            raise WireError(f"unknown modules {sorted(unknown)}: expected {[module]}")
        batch = self._validator.checked(EpisodeBatch.from_tree(frame.tree[module]))
        if batch.live_steps != frame.header.live_steps:
            raise WireError(
                f"header says {frame.header.live_steps} live steps, found {batch.live_steps}"
            )
        return batch
