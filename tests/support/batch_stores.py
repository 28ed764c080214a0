"""A store of batches, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
GENERATION = 5  # of the group when the learner joined it


@dataclass
class World:
    """A store, and what it reported."""

    make_batch: MakeBatch
    arrivals: list[HeldBatch] = field(default_factory=list)

    def open(
        self,
        observation_space: Space[Any] = VECTOR,
        action_space: Space[Any] = TWO,
        **options: Any,
    ) -> BatchStore:
        by_module = {"default": (observation_space, action_space)}
        store = BatchStore(by_module, self.arrivals.append, **options)
        store.serve(joined=GENERATION)
        return store

    def frame(
        self,
        batch_id: int = 1,
        *,
        generation: int = GENERATION,
        live_steps: int | None = None,
        tree: Any = None,
        **columns: Any,
    ) -> BatchFrame:
        """A batch as it comes from the wire: good, but for what is said here."""
        batch = self.make_batch(seed=batch_id, **columns)
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id,
            envrunner="envrunner-3",
            generation=generation,
            live_steps=batch.live_steps if live_steps is None else live_steps,
            version=training_pb2.WeightsVersion(generation=4, update=batch_id),
        )
        tree = {"default": batch.to_tree()} if tree is None else tree
        (chunk,) = encode_frame(header, tree)
        frame = FrameReader(episodes_pb2.BatchHeader).feed(chunk)
        assert frame is not None
        return frame


def refused(world: World, store: BatchStore, frame: BatchFrame) -> str:
    """Why; and that nothing of it stays behind."""
    before = len(world.arrivals)
    try:
        reason = store.take(frame)
    except WireError as error:
        reason = str(error)
    assert reason
    assert len(world.arrivals) == before, "a refused batch was reported"
    return reason
