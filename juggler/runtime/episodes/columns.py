"""Makes a batch of episodes from columns that a script has put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import DEFAULT_MODULE, EpisodeBatch
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import tree_map

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
_CRITIC = ("critic_observations", "last_critic_observations", "final_critic_observations")
_SEGMENTS = ("segment_rows", "segment_starts", "segment_lengths", "segment_offsets")
_LABELS = ("segment_episodes", "segment_generations", "segment_updates")  # no algorithm reads them

#: All columns of a batch of episodes; scripts may add others of their own.
COLUMNS = frozenset({*_REQUIRED, "states", *_FINALS, *_CRITIC, *_SEGMENTS, *_LABELS})


def batch_of_columns(
    columns: Mapping[str, Any], module_id: str = DEFAULT_MODULE, *, remembers: bool = False
) -> EpisodeBatch:
    """Make a batch of episodes from columns, such as those of `collate`.

    Some columns may be missing: `states` if there are none; final_observations, final_rows and
    final_steps if no episode is truncated; those of a value function that sees more than its agent,
    if it does not; and segments, which are then found from the ends of
    episodes.

    Args:
        columns: by name, arrays or tensors on the host, or trees of them. Names that are not in
            `COLUMNS` are ignored.
        module_id: of the module, for messages.
        remembers: whether the module has a state. Segments are then required, as they are with
            `states`.

    Raises:
        WireError: a column is missing or does not fit the others; names it, and what was expected.
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
    if _SEGMENTS[0] not in given:
        given = {name: x for name, x in given.items() if name not in _LABELS}  # of other segments
        given.update(_segments(given["live"], given["terminated"], given["truncated"]))
    for name in (*_FINALS[1:], *_SEGMENTS):
        given[name] = _indices(name, given[name])
    labels = np.zeros(len(given["segment_rows"]), np.uint64)  # [S]
    return EpisodeBatch.from_tree({**dict.fromkeys(_LABELS, labels), **given})


def _segments(*columns: Any) -> dict[str, NDArray[np.int32]]:
    """The segments: one for every stretch of live steps of one episode within a row.

    Args:
        columns: live, terminated and truncated, [N, T] each.
    """
    for name, column in zip(("live", "terminated", "truncated"), columns, strict=True):
        if not isinstance(column, np.ndarray) or column.ndim != 2 or column.dtype != np.bool_:
            raise WireError(f"column {name!r} must be {_REQUIRED[name]}")
        if column.shape != columns[0].shape:
            shapes = f"has shape {column.shape}, expected {columns[0].shape}, that of 'live'"
            raise WireError(f"column {name!r} {shapes}")
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
    """The column as int32, from any dtype of integers."""
    if not isinstance(column, np.ndarray) or column.dtype.kind not in "iu":
        raise WireError(f"column {name!r} must be an array of integers with one dimension")
    if len(column) and not 0 <= int(column.min()) <= int(column.max()) < 1 << 31:
        raise WireError(f"column {name!r} holds an index that is below 0 or too large")
    return column.astype(np.int32)
