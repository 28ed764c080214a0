"""Checks columns from scripts, for algorithms that learn from episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from juggler.learner.data.collate import collate
from juggler.learner.data.sources import Columns
from juggler.learner.data.validation import BatchValidator, Space
from juggler.runtime.connectors.building import LearnerPipeline
from juggler.runtime.episodes.batch import (
    COLUMNS,
    EpisodeBatch,
    all_finite,
    batch_of_columns,
    first_not_finite,
)
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.columns import MODULE_STATE
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

#: What messages about columns begin with.
_BATCH: Final = "batch"


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
        observation_space: of the observations.
        action_space: of the actions.
        states: the expected `states` of one row, as from `Learner.example_states`.
        critic_space: of what the value function sees besides observations; None: nothing.

    Raises:
        ValueError: a column is missing, or its shape, dtype or content does not fit; names the
            column, and says what was expected.
    """
    must_be_columns(batch)
    validator = BatchValidator(_BATCH, observation_space, action_space, states, critic_space)
    arrays = {name: tree_map(_on_host, batch[name]) for name in batch if name in COLUMNS}
    remembers = MODULE_STATE in states
    episodes = validator.checked(batch_of_columns(arrays, _BATCH, remembers=remembers))
    must_be_finite([episodes])
    own = {
        name: tree_map(partial(_as_tensor, where=f"column {name!r}"), column)
        for name, column in batch.items()
        if name not in COLUMNS
    }
    return {**own, **collate([episodes])}


def must_be_columns(sample: Any) -> None:
    """Raise ValueError unless this is columns by name."""
    if not isinstance(sample, Mapping) or not sample:
        raise ValueError(
            f"a {type(sample).__name__} is no sample: give columns by name, or give batches of "
            "episodes to update_from_episodes"
            if sample
            else "no batch: give columns by name"
        )


def must_be_episodes(episodes: Any) -> None:
    """Raise ValueError unless this is a list of batches."""
    if isinstance(episodes, Mapping) or not isinstance(episodes, Sequence):
        raise ValueError(
            f"a {type(episodes).__name__} is no list of episodes: a Learner trains one module, so "
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

    Any other key is an error in the caller's code, whose traceback says more.
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


_STEPS = 32


def example_sample(
    observation_space: Space,
    action_space: Space,
    pipeline: LearnerPipeline | None,
    states: Mapping[str, Tree],
    critic_space: Space | None,
) -> Columns:
    """A row of an episode, after the context connectors of a pipeline.

    Args:
        observation_space: of the module.
        action_space: of the module.
        pipeline: of the learner.
        states: of one row, as from `Learner.example_states`.
        critic_space: of what the value function sees besides observations; None: nothing.
    """
    if pipeline is None:
        return _columns(observation_space, action_space, states, critic_space)
    return pipeline.in_context(_columns(pipeline.stored_space, action_space, states, critic_space))


def _columns(
    observation_space: Space,
    action_space: Space,
    states: Mapping[str, Tree],
    critic_space: Space | None,
) -> dict[str, Any]:
    """One row of an unfinished episode, as `collate` makes it."""
    shape = (1, _STEPS)
    columns: dict[str, Any] = {
        c.OBSERVATIONS: zeros(observation_space, shape),  # [1, T, ...]
        c.LAST_OBSERVATIONS: zeros(observation_space, (1,)),  # [1, ...]
        c.ACTIONS: zeros(action_space, shape),  # [1, T, ...]
        c.STATES: tree_map(lambda x: np.asarray(x)[None], states),  # [1, ...]
        c.LIVE: np.ones(shape, np.bool_),
    }
    columns |= {name: np.zeros(shape, np.bool_) for name in (c.TERMINATED, c.TRUNCATED)}
    columns |= {name: np.zeros(shape, np.float32) for name in (c.REWARDS, c.ACTION_LOGP)}
    segment = (0, 0, _STEPS, 0)  # row, start, length, offset
    columns |= {
        name: np.array([each], np.int32) for name, each in zip(c.SEGMENTS, segment, strict=True)
    }
    if critic_space is not None:
        columns[c.CRITIC_OBSERVATIONS] = zeros(critic_space, shape)  # [1, T, ...]
        columns[c.LAST_CRITIC_OBSERVATIONS] = zeros(critic_space, (1,))  # [1, ...]
    return collate([batch_of_columns(columns)])
