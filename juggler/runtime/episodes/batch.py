"""A batch of episodes in columns: N rows of T steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.version import DEFAULT_MODULE as DEFAULT_MODULE
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Path, Tree, flatten, leaves, path_name

#: Trees of observations [N, T, ...] before each step, [N, ...] after each row and [K, ...] at the
#: end of each truncated episode: of the policy, and of a value function with more inputs.
_OBSERVED = ("observations", "last_observations", "final_observations")
_CRITIC = ("critic_observations", "last_critic_observations", "final_critic_observations")

#: Arrays [N, T], with their dtypes. Rows, samples and examples follow this table.
STEP_COLUMNS: dict[str, np.dtype[Any]] = {
    "rewards": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "live": np.dtype(np.bool_),
    "action_logp": np.dtype(np.float32),
}
_INT32: np.dtype[Any] = np.dtype(np.int32)
_UINT64: np.dtype[Any] = np.dtype(np.uint64)
#: Columns that are no trees, by their dimensions.
_ARRAYS: dict[str, dict[str, np.dtype[Any]]] = {
    "NT": STEP_COLUMNS,
    "K": {"final_rows": _INT32, "final_steps": _INT32},
    "S": {
        "segment_episodes": _UINT64,
        "segment_rows": _INT32,
        "segment_starts": _INT32,
        "segment_lengths": _INT32,
        "segment_offsets": _INT32,
        "segment_generations": _UINT64,
        "segment_updates": _UINT64,
    },
}


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """The steps of one EnvRunner for one request, as arrays.

    See also episodes.proto.

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
    terminated: NDArray[np.bool_]  # [N, T] the environment ended the episode
    truncated: NDArray[np.bool_]  # [N, T] the episode was cut off from outside
    live: NDArray[np.bool_]  # [N, T]
    action_logp: NDArray[np.float32]  # [N, T] under the behaviour policy
    last_observations: Tree  # [N, ...] after the last step of each row
    # The policy's memory at the start of each row: "module", the state of a recurrent module, and
    # "connectors", their contexts by name. Without either, an empty branch.
    states: Mapping[str, Tree]  # [N, ...]
    # One for every episode truncated in this batch, in all autoreset modes, to bootstrap from.
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
    # Additional inputs of the value function; empty branches without them.
    critic_observations: Tree = field(default_factory=dict)  # [N, T, ...]
    last_critic_observations: Tree = field(default_factory=dict)  # [N, ...]
    final_critic_observations: Tree = field(default_factory=dict)  # [K, ...]

    @property
    def rows(self) -> int:
        return int(self.rewards.shape[0])

    @property
    def has_critic(self) -> bool:
        """Whether any column is only for the value function."""
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
        """Return a copy without live steps, which trains nothing."""
        return replace(
            self,
            live=np.zeros_like(self.live),
            segment_lengths=np.zeros_like(self.segment_lengths),
        )

    def to_tree(self) -> dict[str, Tree]:
        """Return the columns by name, without absent ones of a critic."""
        names = _COLUMNS if self.has_critic else _COLUMNS_WITHOUT_CRITIC
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_tree(cls, tree: Tree) -> EpisodeBatch:
        """Make a batch from a received tree, and check it.

        Raises:
            WireError: a column is missing, unknown, or its shape, dtype or indices do not fit.
        """
        if not isinstance(tree, dict):
            raise WireError("a batch must be a branch of columns, not an array")
        if missing := _COLUMNS_WITHOUT_CRITIC.keys() - tree.keys():
            raise WireError(f"batch has no columns {sorted(missing)}")
        if unknown := tree.keys() - _COLUMNS.keys():
            raise WireError(f"batch has unknown columns {sorted(unknown)}")
        for name in chain.from_iterable(_ARRAYS.values()):
            if not isinstance(tree[name], np.ndarray):
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
        for name in ("final_rows", "segment_rows"):
            shape = getattr(self, name).shape
            if len(shape) != 1:
                raise WireError(f"column {name!r} has shape {shape}, expected one dimension")
        # One column each defines K and S.
        sizes = {"NT": (n, t), "K": self.final_rows.shape, "S": self.segment_rows.shape}
        for name in ("observations", "actions"):
            _arrays(name, getattr(self, name), (n, t))
        for dimensions, columns in _ARRAYS.items():
            for name, dtype in columns.items():
                _expect(name, getattr(self, name), dtype, sizes[dimensions])
        # Critic columns are optional, but only all of them together.
        for now, last, final in (_OBSERVED, _CRITIC) if self.has_critic else (_OBSERVED,):
            observations = _arrays(now, getattr(self, now), (n, t))
            _expect_like(last, getattr(self, last), observations, (n,))
            _expect_like(final, getattr(self, final), observations, sizes["K"])
        if not isinstance(self.states, Mapping):
            raise WireError("column 'states' must be a branch, not an array")
        for path, array in leaves(self.states):
            if array is not None:
                _expect_leading(("states", *path), array, (n,))
        # Checked before they index anything: NumPy would accept negative ones.
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
        # Returns are bootstrapped at each truncation, from an observation of its own.
        named = np.zeros((n, t), np.bool_)  # [N, T]
        named[self.final_rows, self.final_steps] = True
        once = np.count_nonzero(named) == len(self.final_rows)
        if not once or np.count_nonzero(self.truncated) != len(self.final_rows):
            raise WireError("a truncated step has no final observation")
        self._check_segments(n, t)

    def _check_segments(self, n: int, t: int) -> None:
        """Check that each live step is in one segment.

        Recurrent modules learn from segments.
        """
        lengths = self.segment_lengths.astype(np.int64)  # [S]
        firsts = self.segment_rows.astype(np.int64) * t + self.segment_starts  # [S]
        skipped = firsts - np.cumsum(lengths) + lengths  # [S]
        covered = np.zeros(n * t, np.bool_)
        covered[np.repeat(skipped, lengths) + np.arange(int(lengths.sum()))] = True
        once = np.count_nonzero(covered) == lengths.sum()
        if not once or not np.array_equal(covered.reshape(n, t), self.live):
            raise WireError(
                "the segments do not cover each live step exactly once, and no other step"
            )
        done = (self.terminated | self.truncated).ravel()  # [N T]
        if np.count_nonzero(done) != np.count_nonzero(done[firsts + lengths - 1]):
            raise WireError("an episode ends within a segment, or in a step that is not live")
        self._check_neighbours(t, firsts, done)

    def _check_neighbours(self, t: int, firsts: NDArray[np.int64], done: NDArray[np.bool_]) -> None:
        """Check that segments end their episode or continue in the next.

        `firsts` has their first steps [S] among all [N T]; returns continue from a segment to the
        next.
        """
        order = firsts.argsort()  # [S]
        one, other = order[:-1], order[1:]  # [S - 1] both
        nexts = firsts[one] + self.segment_lengths[one]  # [S - 1]
        runs_on = (nexts == firsts[other]) & (nexts % t > 0) & ~done[nexts - 1]  # [S - 1]
        one, other = one[runs_on], other[runs_on]  # [J] both
        offsets = self.segment_offsets[one] + self.segment_lengths[one]  # [J]
        continues = self.segment_episodes[one] == self.segment_episodes[other]  # [J]
        if not (continues & (self.segment_offsets[other] == offsets)).all():
            raise WireError(
                "a segment ends in mid-row without an end of its episode, and another episode "
                "follows at once: mark its last step as truncated, with the final observation, or "
                "give the other episode its own row"
            )


_COLUMNS = dict.fromkeys(each.name for each in fields(EpisodeBatch))  # in their order
_COLUMNS_WITHOUT_CRITIC = dict.fromkeys(name for name in _COLUMNS if name not in _CRITIC)


def _arrays(name: str, tree: Tree, leading: tuple[int, ...]) -> dict[Path, NDArray[Any]]:
    """Return the arrays of a column, after checking their leading dimensions."""
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
    """Check that a column holds observations with these leading dimensions."""
    arrays = _arrays(name, tree, leading)
    of_steps = name.partition("_")[2]
    if odd := arrays.keys() ^ observations.keys():
        where = path_name(min(odd))
        raise WireError(f"only one of {of_steps!r} and {name!r} has an array at {where}")
    for path, array in arrays.items():
        like = observations[path]
        if array.dtype != like.dtype:
            column, of = path_name((name, *path)), path_name((of_steps, *path))
            raise WireError(f"column {column} must be {like.dtype}, not {array.dtype}, as {of} are")
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
    # As unsigned numbers, indices below `first` are the largest, so one pass is enough.
    above = (indices - first if first else indices).view(np.uint32)
    if len(indices) and np.maximum.reduce(above) >= stop - first:
        raise WireError(f"column {name!r} holds an index outside {first}..{stop - 1}")


#: The largest reward. Learners square returns and gradients in float32. At a discount of 0.9999,
#: rewards of this size have a return of 1e16. The sum of a million squares of it is still finite.
MOST_REWARD: Final = float(np.float32(1e12))
TOO_LARGE: Final = f"scale rewards to at most {MOST_REWARD:g}, so that squared returns are finite"

#: Columns that must be finite, with their dimensions, in the order of one step.
_FINITE = {
    **dict.fromkeys(("observations", "critic_observations", "action_logp", "rewards"), "NT"),
    **dict.fromkeys(("final_observations", "final_critic_observations"), "K"),
    **dict.fromkeys(("last_observations", "last_critic_observations"), "N"),
}


class NonFiniteNumber(NamedTuple):
    """A number that is not finite.

    Attributes:
        step: of its row.
        row: of the batch.
        column: such as "rewards" or, in a Dict, "observations/camera".
        value: the number.
    """

    step: int
    row: int
    column: str
    value: float


def all_finite(batch: EpisodeBatch) -> bool:
    """Return whether observations, rewards and log-probabilities are finite."""
    columns = (getattr(batch, name) for name in _FINITE)
    return all(np.isfinite(array).all() for column in columns for _, array in floats("", column))


def first_not_finite(batch: EpisodeBatch) -> NonFiniteNumber | None:
    """Return the first number in time that is not finite, or None."""
    # Step, order within it, row, column, number
    found: list[tuple[int, int, int, str, float]] = []
    for order, (column, dimensions) in enumerate(_FINITE.items()):
        for name, array in floats(column, getattr(batch, column)):
            index = np.nonzero(not_finite(array, len(dimensions)))
            rows: NDArray[Any] = index[0]
            steps: NDArray[Any] = index[-1]
            if dimensions == "K":
                rows, steps = batch.final_rows[rows], batch.final_steps[rows]
            # The observation after a row belongs to its last step.
            if dimensions == "N":
                steps = np.full(len(rows), batch.steps - 1)
            for first in np.lexsort((rows, steps))[:1]:
                numbers = np.asarray(array[tuple(each[first] for each in index)])  # [...]
                number = float(numbers[~np.isfinite(numbers)][0])
                found.append((int(steps[first]), order, int(rows[first]), name, number))
    if not found:
        return None
    step, _, row, name, value = min(found)
    return NonFiniteNumber(step, row, name, value)


def floats(name: str, column: Tree) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the floating-point arrays of a column with their names."""
    for path, array in flatten(column):
        if array.dtype.kind == "f":
            yield "/".join((name, *path)), array


def not_finite(array: NDArray[Any], dimensions: int) -> NDArray[np.bool_]:
    """Return a mask, over the leading dimensions, of NaN or infinity."""
    bad = ~np.isfinite(array)
    flags: NDArray[np.bool_] = bad.any(axis=tuple(range(dimensions, bad.ndim)))
    return flags


#: Required columns and their meaning; see `EpisodeBatch`.
_REQUIRED = {
    "observations": "[N, T, ...], before each step",
    "actions": "[N, T, ...], chosen by the policy",
    "rewards": "float32 [N, T]",
    "terminated": "bool [N, T], where the environment ended an episode",
    "truncated": "bool [N, T], where an episode was cut off from outside",
    "live": "bool [N, T], the steps to learn from",
    "action_logp": "float32 [N, T], log-probabilities under the policy that acted",
    "last_observations": "[N, ...], after the last step of each row",
}
_FINALS = ("final_observations", "final_rows", "final_steps")  # needed if an episode is truncated
_SEGMENTS = ("segment_rows", "segment_starts", "segment_lengths", "segment_offsets")
_LABELS = ("segment_episodes", "segment_generations", "segment_updates")  # no algorithm reads them

#: All columns of a batch of episodes; scripts may add their own.
COLUMNS = frozenset(_COLUMNS)


def batch_of_columns(
    columns: Mapping[str, Any], module_id: str = DEFAULT_MODULE, *, remembers: bool = False
) -> EpisodeBatch:
    """Make a batch of episodes from columns, e.g. the result of `collate`.

    Optional columns: `states`; final_observations, final_rows and final_steps if no episode is
    truncated; critic observations; and segments, which are otherwise found from the ends of
    episodes.

    Args:
        columns: by name, arrays or tensors on the host, or trees of them. Names that are not in
            `COLUMNS` are ignored.
        module_id: module for messages.
        remembers: whether the module has a state. Segments are then required, as they are with
            `states`.

    Raises:
        WireError: a column is missing or does not fit the others; names it, and the expected form.
    """
    if not isinstance(columns, Mapping):
        raise WireError(f"{module_id}: columns must be by name, not a {type(columns).__name__}")
    try:
        given = {key: tree_map(np.asarray, x) for key, x in columns.items() if key in COLUMNS}
        return _batch(given, sorted(map(str, columns)), remembers or bool(given.get("states")))
    except WireError as error:
        raise WireError(f"{module_id}: {error}") from None


def _batch(given: dict[str, Any], names: list[str], remembers: bool) -> EpisodeBatch:
    for name, what in _REQUIRED.items():
        if name not in given:
            there = ", ".join(names) or "none"
            raise WireError(f"there is no column {name!r}: {what}; there are {there}")
    for group in (_FINALS, _SEGMENTS):
        missing = [name for name in group if name not in given]
        if missing and len(missing) < len(group):
            raise WireError(f"there is no column {missing[0]!r}, which goes with {group}")
    if remembers and _SEGMENTS[0] not in given:
        raise WireError(
            f"there is no column {_SEGMENTS[0]!r}: a module with a state needs the segments of "
            f"episodes, int [S] each, in {', '.join(_SEGMENTS)}"
        )
    # Everything below can be derived if a script leaves it out.
    given.setdefault("states", {})
    if _FINALS[0] not in given:
        given["final_observations"] = tree_map(
            lambda x: x[:0], given["last_observations"]
        )  # [K = 0, ...]
        if _CRITIC[1] in given:
            given.setdefault(
                _CRITIC[2], tree_map(lambda x: x[:0], given[_CRITIC[1]])
            )  # [K = 0, ...]
        given["final_rows"] = given["final_steps"] = np.zeros(0, np.int32)  # [K = 0]
    # Labels belong to given segments, and would not fit others.
    if _SEGMENTS[0] not in given:
        given = {name: x for name, x in given.items() if name not in _LABELS}
        given.update(_segments(given["live"], given["terminated"], given["truncated"]))
    for name in (*_FINALS[1:], *_SEGMENTS):
        given[name] = _indices(name, given[name])
    labels = np.zeros(len(given["segment_rows"]), np.uint64)  # [S]
    return EpisodeBatch.from_tree({**dict.fromkeys(_LABELS, labels), **given})


def _segments(*columns: Any) -> dict[str, NDArray[np.int32]]:
    """Find segments: stretches of live steps of one episode.

    Args:
        columns: live, terminated and truncated, [N, T] each.
    """
    for name, column in zip(("live", "terminated", "truncated"), columns, strict=True):
        if not isinstance(column, np.ndarray) or column.ndim != 2 or column.dtype != np.bool_:
            raise WireError(f"column {name!r} must be {_REQUIRED[name]}")
        if column.shape != columns[0].shape:
            shapes = f"has shape {column.shape}, expected {columns[0].shape} like 'live'"
            raise WireError(f"column {name!r} {shapes}")
    # A segment ends with its episode, or before a step that only resets.
    live, terminated, truncated = columns
    done = terminated | truncated  # [N, T]
    begins, ends = live.copy(), live.copy()  # [N, T]
    begins[:, 1:] &= ~live[:, :-1] | done[:, :-1]
    ends[:, :-1] &= ~live[:, 1:] | done[:, :-1]
    rows, starts = np.nonzero(begins)  # [S]
    _, lasts = np.nonzero(ends)  # [S]
    return {
        "segment_rows": rows.astype(np.int32),
        "segment_starts": starts.astype(np.int32),
        "segment_lengths": (lasts - starts + 1).astype(np.int32),
        "segment_offsets": np.zeros(len(rows), np.int32),
    }


def _indices(name: str, column: Any) -> NDArray[np.int32]:
    """Return a column as int32, from any integer dtype."""
    if not isinstance(column, np.ndarray) or column.dtype.kind not in "iu":
        raise WireError(f"column {name!r} must be an array of integers with one dimension")
    if len(column) and not 0 <= int(column.min()) <= int(column.max()) < 1 << 31:
        raise WireError(f"column {name!r} holds an index that is below 0 or too large")
    return column.astype(np.int32)
