"""Tracks the running episodes, which fragments cut into segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segments:
    """S segments by row and start: one episode's live steps each."""

    episodes: NDArray[np.uint64]  # [S]
    rows: NDArray[np.int32]  # [S]
    starts: NDArray[np.int32]  # [S]
    lengths: NDArray[np.int32]  # [S]
    offsets: NDArray[np.int32]  # [S]
    episode_returns: NDArray[np.float64]  # [E] episodes that ended here, by their last steps
    episode_lengths: NDArray[np.int64]  # [E]


class RunningEpisodes:
    """Ids, lengths and returns so far of the running episodes.

    Args:
        rows: N, environments.
    """

    def __init__(self, rows: int) -> None:
        self._ids = np.zeros(rows, np.uint64)  # [N]
        self._lengths = np.zeros(rows, np.int64)  # [N]
        self._returns = np.zeros(rows, np.float64)  # [N]
        self._next_id = 0
        self.restart()

    def restart(self) -> None:
        """Drop all running episodes and start a new one in each environment."""
        self._ids[:] = self._new_ids(len(self._ids))
        self._lengths[:] = 0
        self._returns[:] = 0

    def advance(
        self, rewards: NDArray[np.float32], done: NDArray[np.bool_], live: NDArray[np.bool_]
    ) -> Segments:
        """Account for one fragment.

        Args:
            rewards: [N, T]; 0 where a step is not live.
            done: [N, T], the last step of an episode.
            live: [N, T]; false only after an end.
        """
        first_steps = live.copy()  # [N, T]
        first_steps[:, 1:] &= ~live[:, :-1] | done[:, :-1]
        last_steps = done.copy()  # [N, T]
        last_steps[:, -1] |= live[:, -1]
        rows, starts = np.nonzero(first_steps)  # [S] both
        ends = np.nonzero(last_steps)[1]  # [S]

        # The first segment of a row belongs to its running episode, all others to new ones.
        continues = np.ones(len(rows), np.bool_)  # [S]
        continues[1:] = rows[1:] != rows[:-1]
        episodes = self._ids[rows]  # [S]
        episodes[~continues] = self._new_ids(int(np.count_nonzero(~continues)))
        lengths = ends - starts + 1  # [S]
        offsets = np.where(continues, self._lengths[rows], 0)  # [S]
        # Sums from each start to the next one; steps between segments have reward 0.
        sums = np.add.reduceat(rewards.ravel(), rows * live.shape[1] + starts, dtype=np.float64)
        returns = np.where(continues, self._returns[rows], 0) + sums  # [S]

        ended = done[rows, ends]  # [S]
        last = np.ones(len(rows), np.bool_)  # [S]
        last[:-1] = continues[1:]
        at = rows[last]  # rows with a live step
        self._ids[at] = episodes[last]
        self._lengths[at] = np.where(ended, 0, offsets + lengths)[last]
        self._returns[at] = np.where(ended, 0, returns)[last]
        over = at[ended[last]]  # rows whose next step starts an episode
        self._ids[over] = self._new_ids(len(over))

        order = np.flatnonzero(ended)[np.argsort(ends[ended], kind="stable")]  # [E]
        return Segments(
            episodes=episodes,
            rows=rows.astype(np.int32),
            starts=starts.astype(np.int32),
            lengths=lengths.astype(np.int32),
            offsets=offsets.astype(np.int32),
            episode_returns=returns[order],
            episode_lengths=(offsets + lengths)[order],
        )

    def _new_ids(self, count: int) -> NDArray[np.uint64]:
        self._next_id += count
        return np.arange(self._next_id - count, self._next_id, dtype=np.uint64)
