"""The segments of a batch as views, one episode after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


@dataclass(frozen=True, slots=True)
class Episode:
    """A segment of a batch: a view of part of an episode.

    `last_observation` is the observation after the last step. After a terminated episode under
    SAME_STEP or DISABLED autoreset it is the first one of the next episode, and must not be
    bootstrapped from.
    """

    episode_id: int
    offset: int  # earlier steps of the same episode
    version: tuple[int, int]  # (generation, update) of the weights that acted
    observations: Tree  # [L, ...]
    actions: Tree  # [L, ...]
    rewards: NDArray[np.float32]  # [L]
    action_logp: NDArray[np.float32]  # [L]
    terminated: bool
    truncated: bool
    last_observation: Tree

    def __len__(self) -> int:
        return len(self.rewards)


def _at(tree: Tree, index: Any) -> Tree:
    """A view of every array of a tree."""
    found: Tree = tree_map(lambda array: array[index], tree)
    return found


def episodes_of(batch: EpisodeBatch) -> Iterator[Episode]:
    """Views of the batch's segments, in no particular order."""
    for i in range(len(batch.segment_rows)):
        row, start = int(batch.segment_rows[i]), int(batch.segment_starts[i])
        stop = start + int(batch.segment_lengths[i])
        yield Episode(
            episode_id=int(batch.segment_episodes[i]),
            offset=int(batch.segment_offsets[i]),
            version=(int(batch.segment_generations[i]), int(batch.segment_updates[i])),
            observations=_at(batch.observations, (row, slice(start, stop))),
            actions=_at(batch.actions, (row, slice(start, stop))),
            rewards=batch.rewards[row, start:stop],
            action_logp=batch.action_logp[row, start:stop],
            terminated=bool(batch.terminated[row, stop - 1]),
            truncated=bool(batch.truncated[row, stop - 1]),
            last_observation=_observation_after(batch, row, stop - 1),
        )


def _observation_after(batch: EpisodeBatch, row: int, step: int) -> Tree:
    if batch.truncated[row, step]:
        at = np.flatnonzero((batch.final_rows == row) & (batch.final_steps == step))[0]
        return _at(batch.final_observations, int(at))
    if step + 1 < batch.steps:
        return _at(batch.observations, (row, step + 1))
    return _at(batch.last_observations, row)
