"""Batches of episodes with all that can happen in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from juggler.runtime.episodes.batch import EpisodeBatch

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
    """The segment columns; about half of the rows go on with an episode from before them."""
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
