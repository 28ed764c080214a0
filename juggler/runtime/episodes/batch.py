"""A batch of episodes in columns: N rows of T steps of one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.version import DEFAULT_MODULE as DEFAULT_MODULE
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Path, Tree, leaves, path_name

#: Columns that are trees. Their shapes and dtypes depend on the spaces and the module.
_TREES = frozenset({"observations", "actions", "last_observations", "final_observations", "states"})

#: Trees that only batches of modules have whose value function sees more than its agent.
_CRITIC = frozenset(
    {"critic_observations", "last_critic_observations", "final_critic_observations"}
)

_BRANCHES = _TREES | _CRITIC  # may be branches

#: The other columns over [N, T], with the dtype they must have.
_STEP_COLUMNS: dict[str, np.dtype[Any]] = {
    "rewards": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "live": np.dtype(np.bool_),
    "action_logp": np.dtype(np.float32),
}
_INT32: np.dtype[Any] = np.dtype(np.int32)
_UINT64: np.dtype[Any] = np.dtype(np.uint64)
_FINAL_COLUMNS = {"final_rows": _INT32, "final_steps": _INT32}
_SEGMENT_COLUMNS = {
    "segment_episodes": _UINT64,
    "segment_rows": _INT32,
    "segment_starts": _INT32,
    "segment_lengths": _INT32,
    "segment_offsets": _INT32,
    "segment_generations": _UINT64,
    "segment_updates": _UINT64,
}


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """The steps that one EnvRunner sampled for one request, as arrays; see also episodes.proto.

    A batch has N rows (one for each environment of the EnvRunner) of T steps, K truncated episodes
    and S segments. Observations and actions are trees: one array each, or a map of arrays if their
    space is a Dict or a Tuple (see `juggler.runtime.wire.structures`).

    A row may hold the end of one episode and the start of the next. A step that only resets an
    environment (the step after the end of an episode under NEXT_STEP autoreset) has `live` false:
    its reward is 0 and its action had no effect.
    """

    observations: Tree  # [N, T, ...] before step t
    actions: Tree  # [N, T, ...] chosen by the policy
    rewards: NDArray[np.float32]  # [N, T]
    terminated: NDArray[np.bool_]  # [N, T] the environment says the episode ended
    truncated: NDArray[np.bool_]  # [N, T] the episode was cut off from outside
    live: NDArray[np.bool_]  # [N, T]
    action_logp: NDArray[np.float32]  # [N, T] under the behaviour policy
    last_observations: Tree  # [N, ...] after the last step of each row
    # What the policy remembered at the start of each row: "module", the state of a recurrent
    # module, and "connectors", their contexts by name. Without either, an empty branch.
    states: Mapping[str, Tree]  # [N, ...]
    # Of every episode truncated in this batch, in all autoreset modes: to bootstrap from.
    final_observations: Tree  # [K, ...]
    final_rows: NDArray[np.int32]  # [K]
    final_steps: NDArray[np.int32]  # [K]
    # One segment for every stretch of live steps of one episode within a row.
    segment_episodes: NDArray[np.uint64]  # [S] unique within the EnvRunner's incarnation
    segment_rows: NDArray[np.int32]  # [S]
    segment_starts: NDArray[np.int32]  # [S] first step in the row
    segment_lengths: NDArray[np.int32]  # [S]
    segment_offsets: NDArray[np.int32]  # [S] earlier steps of the same episode
    segment_generations: NDArray[np.uint64]  # [S] weights version that acted
    segment_updates: NDArray[np.uint64]  # [S]
    # What the value function sees beside the observations above; without it, empty branches.
    critic_observations: Tree = field(default_factory=dict)  # [N, T, ...]
    last_critic_observations: Tree = field(default_factory=dict)  # [N, ...]
    final_critic_observations: Tree = field(default_factory=dict)  # [K, ...]

    @property
    def rows(self) -> int:
        return int(self.rewards.shape[0])

    @property
    def has_critic(self) -> bool:
        """Whether any column says what a value function sees beside its agent's observations."""
        return any(
            not isinstance(tree := getattr(self, name), Mapping) or bool(tree) for name in _CRITIC
        )

    @property
    def steps(self) -> int:
        return int(self.rewards.shape[1])

    @property
    def live_steps(self) -> int:
        return int(np.count_nonzero(self.live))

    def silenced(self) -> EpisodeBatch:
        """A copy without any live step, so that there is nothing to learn from."""
        return replace(
            self,
            live=np.zeros_like(self.live),
            segment_lengths=np.zeros_like(self.segment_lengths),
        )

    def to_tree(self) -> dict[str, Tree]:
        """The columns by name, without those of a critic that there is not; no copies."""
        names = _COLUMNS if self.has_critic else _COLUMNS_WITHOUT_CRITIC
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_tree(cls, tree: Tree) -> EpisodeBatch:
        """Make a batch of a tree from the network, and check it.

        Raises:
            WireError: a column is missing, unknown, or its shape, dtype or indices do not fit.
        """
        if not isinstance(tree, dict):
            raise WireError("a batch must be a branch of columns, not an array")
        if missing := _COLUMNS_WITHOUT_CRITIC.keys() - tree.keys():
            raise WireError(f"batch lacks the columns {sorted(missing)}")
        if unknown := tree.keys() - _COLUMNS.keys():
            raise WireError(f"batch has unknown columns {sorted(unknown)}")
        for name, value in tree.items():
            if not isinstance(value, np.ndarray) and name not in _BRANCHES:
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
        observations = _arrays("observations", self.observations, (n, t))
        _arrays("actions", self.actions, (n, t))
        for name, dtype in _STEP_COLUMNS.items():
            _expect(name, getattr(self, name), dtype, (n, t))
        for name in ("final_rows", "segment_rows"):
            shape = getattr(self, name).shape
            if len(shape) != 1:
                raise WireError(f"column {name!r} has shape {shape}, expected one dimension")
        k, s = self.final_rows.shape, self.segment_rows.shape
        for name, dtype in _FINAL_COLUMNS.items():
            _expect(name, getattr(self, name), dtype, k)
        for name, dtype in _SEGMENT_COLUMNS.items():
            _expect(name, getattr(self, name), dtype, s)
        _expect_like("last_observations", self.last_observations, observations, (n,))
        _expect_like("final_observations", self.final_observations, observations, k)
        if self.has_critic:
            seen = _arrays("critic_observations", self.critic_observations, (n, t))
            _expect_like("last_critic_observations", self.last_critic_observations, seen, (n,))
            _expect_like("final_critic_observations", self.final_critic_observations, seen, k)
        if not isinstance(self.states, Mapping):
            raise WireError("column 'states' must be a branch, not an array")
        for path, array in leaves(self.states):
            if array is not None:
                _expect_leading(("states", *path), array, (n,))
        _within("final_rows", self.final_rows, n)
        _within("final_steps", self.final_steps, t)
        _within("segment_rows", self.segment_rows, n)
        _within("segment_starts", self.segment_starts, t)
        _within("segment_lengths", self.segment_lengths, t + 1, first=1)
        _within("segment_offsets", self.segment_offsets, 1 << 31)
        ends = self.segment_starts + self.segment_lengths
        _within("segment_starts + segment_lengths", ends, t + 1)
        if not self.truncated[self.final_rows, self.final_steps].all():
            raise WireError("final_rows and final_steps name a step that is not truncated")
        named = np.zeros((n, t), np.bool_)  # [N, T]
        named[self.final_rows, self.final_steps] = True
        once = np.count_nonzero(named) == len(self.final_rows)
        if not once or np.count_nonzero(self.truncated) != len(self.final_rows):
            raise WireError("a truncated step lacks its final observation")
        self._check_segments(n, t)

    def _check_segments(self, n: int, t: int) -> None:
        """Check that each live step is in one segment: recurrent modules learn from segments."""
        lengths = self.segment_lengths.astype(np.int64)  # [S]
        firsts = self.segment_rows.astype(np.int64) * t + self.segment_starts  # [S]
        skipped = firsts - np.cumsum(lengths) + lengths  # [S]
        covered = np.zeros(n * t, np.bool_)
        covered[np.repeat(skipped, lengths) + np.arange(int(lengths.sum()))] = True
        once = np.count_nonzero(covered) == lengths.sum()
        if not once or not np.array_equal(covered.reshape(n, t), self.live):
            raise WireError("the segments do not cover each live step once, and no other")
        done = (self.terminated | self.truncated).ravel()  # [N T]
        if np.count_nonzero(done) != np.count_nonzero(done[firsts + lengths - 1]):
            raise WireError("an episode ends within a segment, or in a step that is not live")
        self._check_neighbours(t, firsts, done)

    def _check_neighbours(self, t: int, firsts: NDArray[np.int64], done: NDArray[np.bool_]) -> None:
        """Check that a segment, whose first step is one of [S] among all [N T], ends its episode or
        goes on in the one that follows at once: returns flow from it to that one."""
        order = firsts.argsort()  # [S]
        one, other = order[:-1], order[1:]  # [S - 1] both
        nexts = firsts[one] + self.segment_lengths[one]  # [S - 1]
        runs_on = (nexts == firsts[other]) & (nexts % t > 0) & ~done[nexts - 1]  # [S - 1]
        one, other = one[runs_on], other[runs_on]  # [J] both
        offsets = self.segment_offsets[one] + self.segment_lengths[one]  # [J]
        goes_on = self.segment_episodes[one] == self.segment_episodes[other]  # [J]
        if not (goes_on & (self.segment_offsets[other] == offsets)).all():
            raise WireError(
                "a segment ends in mid-row without an end of its episode, and another episode "
                "follows at once: mark its last step as truncated, with the final observation, or "
                "give the other episode a row of its own"
            )

    def episodes(self) -> Iterator[Episode]:
        """Views of the batch's segments, in no particular order."""
        for i in range(len(self.segment_rows)):
            row, start = int(self.segment_rows[i]), int(self.segment_starts[i])
            stop = start + int(self.segment_lengths[i])
            yield Episode(
                episode_id=int(self.segment_episodes[i]),
                offset=int(self.segment_offsets[i]),
                version=(int(self.segment_generations[i]), int(self.segment_updates[i])),
                observations=_at(self.observations, (row, slice(start, stop))),
                actions=_at(self.actions, (row, slice(start, stop))),
                rewards=self.rewards[row, start:stop],
                action_logp=self.action_logp[row, start:stop],
                terminated=bool(self.terminated[row, stop - 1]),
                truncated=bool(self.truncated[row, stop - 1]),
                last_observation=self._observation_after(row, stop - 1),
            )

    def _observation_after(self, row: int, step: int) -> Tree:
        if self.truncated[row, step]:
            at = np.flatnonzero((self.final_rows == row) & (self.final_steps == step))[0]
            return _at(self.final_observations, int(at))
        if step + 1 < self.steps:
            return _at(self.observations, (row, step + 1))
        return _at(self.last_observations, row)


_COLUMNS = dict.fromkeys(each.name for each in fields(EpisodeBatch))  # in their order
_COLUMNS_WITHOUT_CRITIC = dict.fromkeys(name for name in _COLUMNS if name not in _CRITIC)


@dataclass(frozen=True, slots=True)
class Episode:
    """A segment of a batch: a view of one stretch of one episode.

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


def _arrays(name: str, tree: Tree, leading: tuple[int, ...]) -> dict[Path, NDArray[Any]]:
    """The arrays of a column, after checking their leading dimensions."""
    arrays: dict[Path, NDArray[Any]] = {}
    for path, array in leaves(tree):
        if array is None:
            raise WireError(f"column {path_name((name, *path))} holds no array")
        _expect_leading((name, *path), array, leading)
        arrays[path] = array
    return arrays


def _expect_like(
    name: str, tree: Tree, observations: dict[Path, NDArray[Any]], leading: tuple[int, ...]
) -> None:
    """Check that a column holds observations like [N, T, ...], with other leading dimensions."""
    arrays = _arrays(name, tree, leading)
    if odd := arrays.keys() ^ observations.keys():
        where = path_name(min(odd))
        of_steps = name.partition("_")[2]
        raise WireError(f"only one of {of_steps!r} and {name!r} has an array at {where}")
    for path, array in arrays.items():
        like = observations[path]
        _expect(name, array, like.dtype, (*leading, *like.shape[2:]), path)


def _expect(
    name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], path: Path = ()
) -> None:
    if array.dtype != dtype:
        column = path_name((name, *path))
        raise WireError(f"column {column} must be {dtype}, not {array.dtype}")
    if array.shape != shape:
        column = path_name((name, *path))
        raise WireError(f"column {column} has shape {array.shape}, expected {shape}")


def _expect_leading(column: Path, array: NDArray[Any], leading: tuple[int, ...]) -> None:
    if array.shape[: len(leading)] != leading:
        expected = ", ".join(map(str, leading))
        raise WireError(
            f"column {path_name(column)} has shape {array.shape}, expected ({expected}, ...)"
        )


def _within(name: str, indices: NDArray[np.int32], stop: int, *, first: int = 0) -> None:
    """Check that all indices are at least `first`, and less than `stop`."""
    # As unsigned numbers, those below `first` are the greatest: so one pass will do.
    above = (indices - first if first else indices).view(np.uint32)
    if len(indices) and np.maximum.reduce(above) >= stop - first:
        raise WireError(f"column {name!r} holds an index outside {first}..{stop - 1}")
