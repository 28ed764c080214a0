"""Batches of episodes with all that can happen in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]


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
        "segment_episodes": np.zeros(0, np.uint64),
        "segment_generations": np.zeros(0, np.uint64),
        "segment_updates": np.zeros(0, np.uint64),
        **{
            f"segment_{name}": np.zeros(0, np.int32)
            for name in ("rows", "starts", "lengths", "offsets")
        },
        **columns,
    }
    final_rows, final_steps = np.nonzero(tree["truncated"])
    tree.setdefault("final_rows", final_rows.astype(np.int32))
    tree.setdefault("final_steps", final_steps.astype(np.int32))
    tree.setdefault("final_observations", normal(len(final_rows), observation_size))
    return EpisodeBatch.from_tree(tree)


@pytest.fixture(name="make_batch", scope="session")
def _make_batch() -> MakeBatch:
    return make_batch
