"""A batch of episodes in columns: N rows of T steps of one module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Tree

DEFAULT_MODULE = "default"

#: Columns over [N, T], with the dtype they must have (None: the space decides).
_STEP_COLUMNS: dict[str, type | None] = {
    "observations": None,
    "actions": None,
    "rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "live": np.bool_,
    "action_logp": np.float32,
}
_FINAL_COLUMNS = {"final_rows": np.int32, "final_steps": np.int32}
_SEGMENT_COLUMNS = {
    "segment_episodes": np.uint64,
    "segment_rows": np.int32,
    "segment_starts": np.int32,
    "segment_lengths": np.int32,
    "segment_offsets": np.int32,
    "segment_generations": np.uint64,
    "segment_updates": np.uint64,
}


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """What one envrunner sampled for one request, as arrays. proto/…/episodes.proto says the same.

    N rows (one for each environment of the runner), T steps each, K truncated episodes, S segments.
    A row may hold the end of one episode and the start of the next. A step that only reset an
    environment (the step after the end of an episode under NEXT_STEP autoreset) is in its row with
    `live` false: its reward is 0 and its action had no effect.
    """

    observations: NDArray[np.generic]  # [N, T, ...] what the policy saw before step t
    actions: NDArray[np.generic]  # [N, T, ...] what the policy chose
    rewards: NDArray[np.float32]  # [N, T]
    terminated: NDArray[np.bool_]  # [N, T] the environment says the episode ended
    truncated: NDArray[np.bool_]  # [N, T] the episode was cut off from outside
    live: NDArray[np.bool_]  # [N, T]
    action_logp: NDArray[np.float32]  # [N, T] under the behaviour policy
    last_observations: NDArray[np.generic]  # [N, ...] after the last step of each row
    # Of every episode truncated in this batch, whatever the autoreset mode: what to bootstrap from.
    final_observations: NDArray[np.generic]  # [K, ...]
    final_rows: NDArray[np.int32]  # [K]
    final_steps: NDArray[np.int32]  # [K]
    # One for every stretch of live steps of one episode within a row.
    segment_episodes: NDArray[np.uint64]  # [S] unique within the runner's incarnation
    segment_rows: NDArray[np.int32]  # [S]
    segment_starts: NDArray[np.int32]  # [S] first step in the row
    segment_lengths: NDArray[np.int32]  # [S]
    segment_offsets: NDArray[np.int32]  # [S] steps of the same episode before this stretch
    segment_generations: NDArray[np.uint64]  # [S] weights version that acted
    segment_updates: NDArray[np.uint64]  # [S]

    @property
    def rows(self) -> int:
        return int(self.rewards.shape[0])

    @property
    def steps(self) -> int:
        return int(self.rewards.shape[1])

    @property
    def live_steps(self) -> int:
        return int(np.count_nonzero(self.live))

    def to_tree(self) -> dict[str, Tree]:
        """The columns by name; no copies."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tree(cls, tree: Tree) -> EpisodeBatch:
        """The batch in a tree from the network.

        Raises:
            WireError: a column is missing, unknown, or its shape, dtype or indices do not fit.
        """
        if not isinstance(tree, dict):
            raise WireError("a batch must be a branch of columns, not an array")
        known = {field.name for field in fields(cls)}
        if missing := known - tree.keys():
            raise WireError(f"batch lacks the columns {sorted(missing)}")
        if unknown := tree.keys() - known:
            raise WireError(f"batch has unknown columns {sorted(unknown)}")
        for name, value in tree.items():
            if not isinstance(value, np.ndarray):
                raise WireError(f"column {name!r} must be an array, not a branch")
        batch = cls(**tree)
        batch._check()
        return batch

    def _check(self) -> None:
        if self.rewards.ndim != 2:
            raise WireError(f"rewards must have shape [N, T], not {self.rewards.shape}")
        n, t = self.rewards.shape
        if not n or not t:
            raise WireError(f"a batch of {n} rows and {t} steps holds nothing")
        for name, dtype in _STEP_COLUMNS.items():
            _expect(name, getattr(self, name), dtype, (n, t), exact=dtype is not None)
        for name in ("final_rows", "segment_rows"):
            shape = getattr(self, name).shape
            if len(shape) != 1:
                raise WireError(f"column {name!r} has shape {shape}, expected one dimension")
        k, s = self.final_rows.shape, self.segment_rows.shape
        for name, dtype in _FINAL_COLUMNS.items():
            _expect(name, getattr(self, name), dtype, k, exact=True)
        for name, dtype in _SEGMENT_COLUMNS.items():
            _expect(name, getattr(self, name), dtype, s, exact=True)
        shape, kind = self.observations.shape[2:], self.observations.dtype
        _expect("last_observations", self.last_observations, kind, (n, *shape), exact=True)
        _expect("final_observations", self.final_observations, kind, (*k, *shape), exact=True)
        _within("final_rows", self.final_rows, n)
        _within("final_steps", self.final_steps, t)
        _within("segment_rows", self.segment_rows, n)
        _within("segment_starts", self.segment_starts, t)
        _within("segment_lengths", self.segment_lengths, t + 1, first=1)
        _within("segment_offsets", self.segment_offsets, 1 << 31)
        ends = self.segment_starts.astype(np.int64) + self.segment_lengths
        _within("segment_starts + segment_lengths", ends, t + 1)
        if not self.truncated[self.final_rows, self.final_steps].all():
            raise WireError("final_rows and final_steps name a step that is not truncated")
        named = np.unique(self.final_rows.astype(np.int64) * t + self.final_steps)
        if not np.count_nonzero(self.truncated) == len(named) == len(self.final_rows):
            raise WireError("a truncated step lacks its final observation")

    def episodes(self) -> Iterator[Episode]:
        """Views of the batch's segments, in no particular order."""
        for i in range(len(self.segment_rows)):
            row, start = int(self.segment_rows[i]), int(self.segment_starts[i])
            stop = start + int(self.segment_lengths[i])
            yield Episode(
                episode_id=int(self.segment_episodes[i]),
                offset=int(self.segment_offsets[i]),
                version=(int(self.segment_generations[i]), int(self.segment_updates[i])),
                observations=self.observations[row, start:stop],
                actions=self.actions[row, start:stop],
                rewards=self.rewards[row, start:stop],
                action_logp=self.action_logp[row, start:stop],
                terminated=bool(self.terminated[row, stop - 1]),
                truncated=bool(self.truncated[row, stop - 1]),
                last_observation=self._observation_after(row, stop - 1),
            )

    def _observation_after(self, row: int, step: int) -> NDArray[np.generic]:
        if self.truncated[row, step]:
            at = np.flatnonzero((self.final_rows == row) & (self.final_steps == step))[0]
            found = self.final_observations[at]
        elif step + 1 < self.steps:
            found = self.observations[row, step + 1]
        else:
            found = self.last_observations[row]
        observation: NDArray[np.generic] = found
        return observation


@dataclass(frozen=True, slots=True)
class Episode:
    """A stretch of one episode: a view into a batch, made when somebody asks for it.

    `last_observation` is the one after the last step. After a terminated episode under SAME_STEP
    or DISABLED autoreset it is the next episode's first: nobody bootstraps from it.
    """

    episode_id: int
    offset: int  # steps of the same episode before this stretch
    version: tuple[int, int]  # of the weights that acted: (generation, update)
    observations: NDArray[np.generic]  # [L, ...]
    actions: NDArray[np.generic]  # [L, ...]
    rewards: NDArray[np.float32]  # [L]
    action_logp: NDArray[np.float32]  # [L]
    terminated: bool
    truncated: bool
    last_observation: NDArray[np.generic]

    def __len__(self) -> int:
        return len(self.rewards)


def _expect(
    name: str,
    array: NDArray[np.generic],
    dtype: np.dtype[np.generic] | type | None,
    shape: tuple[int, ...],
    *,
    exact: bool = False,
) -> None:
    if dtype is not None and array.dtype != dtype:
        raise WireError(f"column {name!r} must be {np.dtype(dtype)}, not {array.dtype}")
    found = array.shape if exact else array.shape[: len(shape)]
    if found != shape:
        raise WireError(f"column {name!r} has shape {array.shape}, expected {shape}")


def _within(name: str, indices: NDArray[np.integer], stop: int, *, first: int = 0) -> None:
    if len(indices) and (indices.min() < first or indices.max() >= stop):
        raise WireError(f"column {name!r} holds an index outside {first}..{stop - 1}")
