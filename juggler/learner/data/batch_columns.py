"""Checks columns that a script has put together, for algorithms that learn from episodes."""

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
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.columns import COLUMNS, batch_of_columns
from juggler.runtime.episodes.finiteness import all_finite, first_not_finite
from juggler.runtime.modules.columns import MODULE_STATE
from juggler.runtime.wire.structures import tree_map
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
    """Check a batch of columns on the host, and return it as `collate` would make it.

    Columns that no batch of episodes has may be anything that is made of tensors and arrays.

    Args:
        batch: columns as tensors or arrays.
        observation_space: of the observations.
        action_space: of the actions.
        states: the expected `states` of one row, as from `Learner.example_states`.
        critic_space: of what the value function sees beside observations; None: nothing.

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
    """
    Raises:
        ValueError: this is not columns by name.
    """
    if not isinstance(sample, Mapping) or not sample:
        raise ValueError(
            f"a {type(sample).__name__} is no sample: give columns by name, or give batches of "
            "episodes to update_from_episodes"
            if sample
            else "no batch: give columns by name"
        )


def must_be_episodes(episodes: Any) -> None:
    """
    Raises:
        ValueError: this is not a list of batches.
    """
    if isinstance(episodes, Mapping) or not isinstance(episodes, Sequence):
        raise ValueError(
            f"a {type(episodes).__name__} is no list of episodes: a Learner trains one module, so "
            "give it a list of EpisodeBatch"
        )


def must_be_finite(batches: Sequence[EpisodeBatch]) -> None:
    """
    Raises:
        ValueError: batches hold NaN or infinity, which a replay would keep.
    """
    for place, batch in enumerate(batches):
        if found := None if all_finite(batch) else first_not_finite(batch):
            of_batch = f" of batch {place}" if len(batches) > 1 else ""
            raise ValueError(
                f"{found.column} in row {found.row}{of_batch} at step {found.step} are "
                f"{found.value}: only finite numbers can be learned from, in steps that are not "
                "live, too"
            )


def must_have_column(sample: Columns, error: KeyError, algorithm: str) -> None:
    """Raises:
    ValueError: the key that was not found is a column of batches of episodes, and the sample lacks
        it. Any other key is a mistake of somebody's code, whose traceback tells more.
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
