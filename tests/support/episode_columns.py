"""Batches for the tests of episodes: one with every way a stretch of an episode can end."""

from __future__ import annotations

from typing import Any

import numpy as np

TRUNCATED_IN_MID_ROW, RUNNING, TERMINATED, TRUNCATED_AT_THE_END, FIRST_HALF, SECOND_HALF = range(6)


def columns(**changed: Any) -> dict[str, Any]:
    """N = 4 rows of T = 4 steps, K = 2 truncated episodes, S = 6 segments.

    The observation of row r before step t is [r, t]; the final one of an episode truncated there
    is [100 + r, t]. The segments, in the order of the names above:

        row 0: episode 11 is truncated after two steps, episode 12 goes on after the row
        row 1: episode 13, five steps old, terminates after three; then a reset row
        row 2: episode 14 is truncated by its fourth step
        row 3: episode 15 changes from version (1, 7) to (1, 8) in its middle
    """
    rows, steps = 4, 4
    grid = np.moveaxis(np.indices((rows, steps), np.float32), 0, -1)  # [N, T, 2]
    ends = np.zeros((2, rows, steps), np.bool_)
    terminated, truncated = ends  # [N, T]
    terminated[1, 2] = truncated[0, 1] = truncated[2, 3] = True
    live = np.ones((rows, steps), np.bool_)
    live[1, 3] = False
    return {
        "observations": np.ascontiguousarray(grid),
        "actions": np.arange(rows * steps).reshape(rows, steps) % 3,
        "rewards": np.arange(rows * steps, dtype=np.float32).reshape(rows, steps) * live,
        "terminated": terminated,
        "truncated": truncated,
        "live": live,
        "action_logp": np.full((rows, steps), -0.5, np.float32),
        "last_observations": np.array([[row, steps] for row in range(rows)], np.float32),
        "states": {},
        "final_observations": np.array([[100, 1], [102, 3]], np.float32),
        "final_rows": np.array([0, 2], np.int32),
        "final_steps": np.array([1, 3], np.int32),
        "segment_episodes": np.array([11, 12, 13, 14, 15, 15], np.uint64),
        "segment_rows": np.array([0, 0, 1, 2, 3, 3], np.int32),
        "segment_starts": np.array([0, 2, 0, 0, 0, 2], np.int32),
        "segment_lengths": np.array([2, 2, 3, 4, 2, 2], np.int32),
        "segment_offsets": np.array([0, 0, 5, 0, 0, 2], np.int32),
        "segment_generations": np.ones(6, np.uint64),
        "segment_updates": np.array([7, 7, 7, 7, 7, 8], np.uint64),
        **changed,
    }


def column_with(name: str, at: tuple[int, ...], value: Any) -> dict[str, Any]:
    """One of those columns with another value in one place, to be given to `columns`."""
    column = columns()[name]
    column[at] = value
    return {name: column}
