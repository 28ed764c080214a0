"""Batches of random episodes, and stores and replays of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.replay.replay import Replay
from juggler.learner.data.replay.table import ReplayTable
from juggler.learner.data.sources import Columns
from juggler.learner.data.validation import BatchValidator
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

#: The fixture `make_batch`, and the spaces of its batches.
MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)

_SEGMENT_COLUMNS = [f"segment_{name}" for name in ("rows", "starts", "lengths", "offsets")]


def make_batch(
    rows: int = 3,
    steps: int = 6,
    *,
    seed: int = 0,
    ends: float = 0.3,
    reset_rows: bool = True,
    observation_size: int = 4,
    choices: int = 2,
    **columns: Any,
) -> EpisodeBatch:
    """A batch with random columns, some of them replaced by those given.

    Args:
        rows: N.
        steps: T.
        seed: of the random columns.
        ends: share of steps that end an episode, half of them by truncation.
        reset_rows: the step after an end only resets the environment, and is not live.
        observation_size: of a vector observation.
        choices: how many actions there are.
        columns: by name.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    live = np.ones((rows, steps), np.bool_)
    terminated = np.zeros((rows, steps), np.bool_)
    truncated = np.zeros((rows, steps), np.bool_)
    for row in range(rows):
        ended = False
        for step in range(steps):
            if ended and reset_rows:
                live[row, step], ended = False, False
                continue
            ended = bool(rng.random() < ends)
            by_truncation = bool(rng.random() < 0.5)
            terminated[row, step] = ended and not by_truncation
            truncated[row, step] = ended and by_truncation
    tree = {
        "observations": normal(rows, steps, observation_size),
        "actions": rng.integers(0, choices, (rows, steps)),
        "rewards": normal(rows, steps) * live,
        "terminated": terminated,
        "truncated": truncated,
        "live": live,
        "action_logp": -np.abs(normal(rows, steps)),
        "last_observations": normal(rows, observation_size),
        "states": {},
        **columns,
    }
    final_rows, final_steps = np.nonzero(tree["truncated"])
    tree.setdefault("final_rows", final_rows.astype(np.int32))
    tree.setdefault("final_steps", final_steps.astype(np.int32))
    tree.setdefault("final_observations", normal(len(final_rows), observation_size))
    done = tree["terminated"] | tree["truncated"]
    segments = _segments(tree["live"], done, np.random.default_rng((seed, 1)))
    return EpisodeBatch.from_tree({**segments, **tree})


def _segments(live: np.ndarray, done: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """Segment columns; about half of the rows continue an episode."""
    found = []
    for row, step in np.argwhere(live):
        if step == 0 or done[row, step - 1] or not live[row, step - 1]:
            found.append([row, step, 0, rng.integers(0, 2) * 7 if step == 0 else 0])
        found[-1][2] += 1
    columns = np.array(found, np.int32).reshape(-1, 4).T  # [4, S]
    numbers = np.arange(columns.shape[1], dtype=np.uint64)  # [S]
    return {
        **dict(zip(_SEGMENT_COLUMNS, columns, strict=True)),
        "segment_episodes": numbers,
        "segment_generations": np.ones_like(numbers),
        "segment_updates": np.ones_like(numbers),
    }


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
        states: Any = None,
        **options: Any,
    ) -> BatchStore:
        validator = BatchValidator("default", observation_space, action_space, states or {})
        store = BatchStore(validator, self.arrivals.append, **options)
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
        """A batch from the wire, valid except for these arguments."""
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
        reason = store.insert(frame)
    except WireError as error:
        reason = str(error)
    assert reason
    assert len(world.arrivals) == before, "a refused batch was reported"
    return reason


def make(**changes: Any) -> Replay:
    defaults: dict[str, Any] = {"capacity": 100, "size": 4, "ratio": 2.0}
    return Replay(lambda columns: dict(columns), **{**defaults, **changes})


def table_of(
    capacity: int,
    kind: type[ReplayTable] = ReplayTable,
    seed: int = 0,
    directory: str = "",
    alpha: float = 0.0,
) -> Any:
    return kind(capacity, alpha, np.random.default_rng(seed), directory)


def numbered(first: int, count: int) -> Columns:
    return {"number": torch.arange(first, first + count), "half": torch.ones(count, 2)}


def in_format_4(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as earlier versions saved it, with numbers by age."""
    kept = dict(state["modules"]["default"])
    numbers, weights, pace = kept.pop("numbers"), kept.pop("weights"), kept.pop("pace")
    (following, *rows), times = kept.pop("counts").tolist(), kept.pop("drawn")
    ages = (following + np.arange(len(times))) % max(1, len(times))  # slots, the oldest row first
    generations = np.zeros(len(times), np.int64)
    generations[ages] = 1 + rows[0] - len(times) + np.arange(len(times))
    table = {"generations": generations, "counts": np.array([rows[0], following])}
    table |= {name: kept.pop(name) for name in ("columns", "stacks", "frames") if name in kept}
    selection = {
        "times": times[ages],
        "weights": weights[ages] if len(weights) else weights,
        "numbers": numbers,
        "rows": np.array(rows),
    }
    own = {"due": pace[0], "count": pace[1].astype(int)}  # of MixInReplay
    if len(pace) > 2:
        own = {"counts": pace[:-1], "stale_priorities": pace[-1].astype(int)}
    kept |= {"table": table, "selection": selection, **own}
    return {**state, "format": np.array(4), "modules": {"default": kept}}


def drawn(samples: Any) -> list[int]:
    return [int(x) for each in samples for x in each["number"]]


def kept(table: ReplayTable) -> list[int]:
    """The numbers of the rows in a table, the oldest first."""
    numbers: list[int] = table.rows(table.oldest_first())["number"].tolist()
    return numbers
