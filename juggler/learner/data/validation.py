"""Checks batches and columns against their module's spaces and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.learner.data.collate import collate
from juggler.learner.data.sources import Columns
from juggler.runtime.connectors.leaves import acted_dtype
from juggler.runtime.connectors.pipelines import LearnerPipeline
from juggler.runtime.episodes.batch import (
    COLUMNS,
    STEP_COLUMNS,
    EpisodeBatch,
    all_finite,
    batch_of_columns,
    first_not_finite,
)
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import choices_of, space_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name, unflatten

Space = gymnasium.Space[Any]

#: Prefix of messages about columns.
_BATCH: Final = "batch"
_STEPS = 32  # of an example sample


class BatchValidator:
    """Checks batches of one module.

    Args:
        module: the module's id, for messages.
        observation_space: space of the observations in its batches.
        action_space: space of the actions in its batches.
        states: the expected `EpisodeBatch.states` of one row, a tree of arrays [...]; {}: none.
        critic_space: space of its critic's observations; None: its batches have none.

    Raises:
        UnsupportedSpace: Juggler cannot encode a space.
    """

    def __init__(
        self,
        module: str,
        observation_space: Space,
        action_space: Space,
        states: Tree,
        critic_space: Space | None = None,
    ) -> None:
        self.module = module
        observed, acted = dict(space_leaves(observation_space)), dict(space_leaves(action_space))
        seen = {} if critic_space is None else dict(space_leaves(critic_space))
        self._acted = {path: acted_dtype(space) for path, space in acted.items()}
        of_observations = ("N, T", "N", "K")
        #: By column: leading dimensions, and the spaces or example arrays of the leaves.
        self._expected: dict[str, tuple[str, dict[Path, Any]]] = {
            **{x: (of, observed) for x, of in zip(c.OBSERVED, of_observations, strict=True)},
            **{x: (of, seen) for x, of in zip(c.OBSERVED_BY_CRITIC, of_observations, strict=True)},
            c.ACTIONS: ("N, T", acted),
            c.STATES: ("N", dict(flatten(states))),
        }

    def checked(self, batch: EpisodeBatch) -> EpisodeBatch:
        """Check a batch; return it with actions in canonical dtypes.

        This way batches of several EnvRunners fit into one update.

        Raises:
            WireError: the batch does not fit; names the array.
        """
        for column, (leading, expected) in self._expected.items():
            arrays = dict(flatten(getattr(batch, column)))
            if odd := arrays.keys() ^ expected.keys():
                odd_one = min(odd)
                which = "have" if odd_one in arrays else "lack"
                names = ", ".join(path_name(path) for path in expected) or "none"
                raise WireError(
                    f"{self._name(column, ())} {which} an array at {path_name(odd_one)}; "
                    f"expected: {names}"
                )
            # A policy acts in float32 if the space is float64, so only the kind must fit.
            of = _kind if column == c.ACTIONS else _dtype
            for path, array in arrays.items():
                like, shape = expected[path], array.shape[leading.count(",") + 1 :]
                if shape != like.shape or of(array) != of(like):
                    raise WireError(
                        f"{self._name(column, path)} of shape [{leading}, *{shape}] and dtype "
                        f"{array.dtype} do not fit {_described(like)}"
                    )
                self._check_choices(column, path, array, like)
        # EnvRunners may act in several dtypes of one kind.
        actions = dict(flatten(batch.actions))
        if all(array.dtype == self._acted[path] for path, array in actions.items()):
            return batch
        kept = [
            (path, array.astype(self._acted[path], copy=False)) for path, array in actions.items()
        ]
        return replace(batch, actions=unflatten(kept))

    def _check_choices(self, column: str, path: Path, array: NDArray[Any], like: Any) -> None:
        # These are indices, and a number out of range would break the update.
        for choice in choices_of([((), like)]):
            if choice.outside(array) is not None:
                raise WireError(
                    f"{self._name(column, path)} hold a number outside "
                    f"{np.array(choice.first).tolist()}..{np.array(choice.last).tolist()}"
                )

    def _name(self, column: str, path: Path) -> str:
        return f"{self.module}: {'/'.join((column, *path))}"


def _dtype(of: NDArray[Any] | Space) -> np.dtype[Any]:
    return np.dtype(of.dtype)


def _described(like: NDArray[Any] | Space) -> str:
    if isinstance(like, gymnasium.Space):
        return f"the space {like}"
    return f"the module's, [N, *{like.shape}] of {like.dtype}"


def _kind(of: NDArray[Any] | Space) -> str:
    kind = np.dtype(of.dtype).kind
    return "i" if kind == "u" else kind


def checked_batch(
    batch: Columns,
    observation_space: Space,
    action_space: Space,
    states: Mapping[str, Tree],
    critic_space: Space | None,
) -> Columns:
    """Check a batch of columns, and return it as `collate` would.

    Unknown columns may hold any tensors and arrays.

    Args:
        batch: columns as tensors or arrays.
        observation_space: space of the observations.
        action_space: space of the actions.
        states: the expected `states` of one row, as from `Learner.example_states`.
        critic_space: space of the value function's private observations; None: none.

    Raises:
        ValueError: a column is missing, or its shape, dtype or content does not fit. The message
            has the column and the expected value.
    """
    must_be_columns(batch)
    validator = BatchValidator(_BATCH, observation_space, action_space, states, critic_space)
    arrays = {name: tree_map(_on_host, batch[name]) for name in batch if name in COLUMNS}
    remembers = c.MODULE_STATE in states
    episodes = validator.checked(batch_of_columns(arrays, _BATCH, remembers=remembers))
    must_be_finite([episodes])
    own = as_tensors({name: batch[name] for name in batch if name not in COLUMNS})
    return {**own, **collate([episodes])}


def as_tensors(columns: Columns) -> Columns:
    """Convert arrays of columns to tensors.

    Raises:
        ValueError: a column has neither tensors nor arrays of numbers.
    """
    return {
        name: tree_map(partial(_as_tensor, where=f"column {name!r}"), column)
        for name, column in columns.items()
    }


def must_be_columns(sample: Any) -> None:
    """Raise ValueError unless this is columns by name."""
    if not isinstance(sample, Mapping) or not sample:
        raise ValueError(
            f"{type(sample).__name__} is no sample: give columns by name, or give batches of "
            "episodes to update_from_episodes"
            if sample
            else "no batch: give columns by name"
        )


def must_be_episodes(episodes: Any) -> None:
    """Raise ValueError unless this is a list of batches."""
    if isinstance(episodes, Mapping) or not isinstance(episodes, Sequence):
        raise ValueError(
            f"{type(episodes).__name__} is no list of episodes: a Learner trains one module, so "
            "give it a list of EpisodeBatch"
        )


def must_be_finite(batches: Sequence[EpisodeBatch]) -> None:
    """Raise ValueError for NaN or infinity, which a replay would keep."""
    for place, batch in enumerate(batches):
        if found := None if all_finite(batch) else first_not_finite(batch):
            of_batch = f" of batch {place}" if len(batches) > 1 else ""
            raise ValueError(
                f"{found.column} in row {found.row}{of_batch} at step {found.step} are "
                f"{found.value}: only finite numbers can be learned from, in steps that are not "
                "live, too"
            )


def must_have_column(sample: Columns, error: KeyError, algorithm: str) -> None:
    """Raise ValueError if a KeyError names a missing column of batches.

    Any other key is an error in the caller's code, which its traceback explains.
    """
    key = error.args[0] if error.args else None
    if key in COLUMNS and key not in sample:
        raise ValueError(
            f"the sample has no column {key!r}, which {algorithm!r} needs; it has "
            f"{', '.join(sorted(sample))}"
        ) from error


def _as_tensor(column: Any, where: str) -> Tensor:
    if isinstance(column, Tensor):
        return column
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(column).reshape(column.shape))
    kind = (
        f"an array of {column.dtype}" if isinstance(column, np.ndarray) else type(column).__name__
    )
    raise ValueError(
        f"{where} must be a tensor or an array of numbers, or a dict of them, not {kind}"
    )


def _on_host(column: Any) -> Any:
    return column.detach().cpu() if isinstance(column, Tensor) else column


def example_sample(
    observation_space: Space,
    action_space: Space,
    pipeline: LearnerPipeline | None,
    states: Mapping[str, Tree],
    critic_space: Space | None,
) -> Columns:
    """Make a row of an unfinished episode, after a pipeline's context connectors.

    Args:
        observation_space: the module's observation space.
        action_space: the module's action space.
        pipeline: the learner's pipeline.
        states: states of one row, as from `Learner.example_states`.
        critic_space: space of the value function's private observations; None: none.
    """
    if pipeline is not None:
        observation_space = pipeline.stored_space
    shape = (1, _STEPS)
    columns: dict[str, Any] = {
        c.OBSERVATIONS: zeros(observation_space, shape),  # [1, T, ...]
        c.LAST_OBSERVATIONS: zeros(observation_space, (1,)),  # [1, ...]
        c.ACTIONS: zeros(action_space, shape),  # [1, T, ...]
        c.STATES: tree_map(lambda x: np.asarray(x)[None], states),  # [1, ...]
    }
    # The episode continues after the row, so it has no final observation.
    columns |= {name: np.zeros(shape, dtype) for name, dtype in STEP_COLUMNS.items()}
    columns[c.LIVE] |= True
    segment = (0, 0, _STEPS, 0)  # row, start, length, offset
    columns |= {
        name: np.array([each], np.int32) for name, each in zip(c.SEGMENTS, segment, strict=True)
    }
    if critic_space is not None:
        columns[c.CRITIC_OBSERVATIONS] = zeros(critic_space, shape)  # [1, T, ...]
        columns[c.LAST_CRITIC_OBSERVATIONS] = zeros(critic_space, (1,))  # [1, ...]
    sample = collate([batch_of_columns(columns)])
    return sample if pipeline is None else pipeline.in_context(sample)
