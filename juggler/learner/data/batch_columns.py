"""Checks columns that a script has put together, for algorithms that learn from episodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from juggler.learner.data.collate import collate
from juggler.learner.data.sources import Columns, Sample
from juggler.learner.data.validation import BatchValidator, Space
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.columns import COLUMNS, batch_of_columns
from juggler.runtime.episodes.finiteness import all_finite, first_not_finite
from juggler.runtime.modules.columns import MODULE_STATE
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


def checked_batch(
    batch: Sample,
    spaces: Mapping[str, tuple[Space, Space]],
    states: Mapping[str, Mapping[str, Tree]],
    critic_spaces: Mapping[str, Space],
) -> Sample:
    """Check a batch of columns on the host, and return it as `collate` would make it.

    Columns that no batch of episodes has may be anything that is made of tensors and arrays.

    Args:
        batch: by module id, columns as tensors or arrays.
        spaces: by module id, the spaces of observations and of actions.
        states: by module id, the expected `states` of one row, as from `Learner.example_states`.
        critic_spaces: by module id, of what its value function sees beside observations, if it
            does.

    Raises:
        ValueError: a column is missing, or its shape, dtype or content does not fit; names the
            module and the column, and says what was expected.
    """
    if not batch:
        raise ValueError("no batch: give columns by name, by module id")
    must_be_sample(batch, spaces)
    return {
        module_id: _checked(
            columns,
            BatchValidator(
                module_id,
                *spaces[module_id],
                states.get(module_id, {}),
                critic_spaces.get(module_id),
            ),
            module_id,
            remembers=MODULE_STATE in states.get(module_id, {}),
        )
        for module_id, columns in batch.items()
    }


def must_be_sample(sample: Any, known: Collection[str]) -> None:
    """
    Args:
        sample: what was given as a sample.
        known: the ids of all modules; none: they are not known.

    Raises:
        ValueError: it is not columns by name, by the id of a known module.
    """
    if not isinstance(sample, Mapping):
        raise ValueError(
            f"a {type(sample).__name__} is no sample: give columns by name, by module id, or give "
            "batches of episodes to update_from_episodes"
        )
    for module_id, columns in sample.items():
        if not isinstance(columns, Mapping):
            raise ValueError(f"{module_id}: columns must be by name, by module id")
        if known and module_id not in known:
            raise ValueError(f"there is no module {module_id!r}{nearest(module_id, known)}")


def must_be_finite(module_id: str, batches: Sequence[EpisodeBatch]) -> None:
    """
    Raises:
        ValueError: batches of a module hold NaN or infinity, which a replay would keep.
    """
    for place, batch in enumerate(batches):
        if found := None if all_finite(batch) else first_not_finite(batch):
            of_batch = f" of batch {place}" if len(batches) > 1 else ""
            raise ValueError(
                f"{module_id}: {found.column} in row {found.row}{of_batch} at step {found.step} "
                f"are {found.value}: only finite numbers can be learned from, in steps that are "
                "not live, too"
            )


def must_have_column(sample: Sample, error: KeyError, algorithm: str) -> None:
    """Raises:
    ValueError: the key that was not found is a column of batches of episodes, and a module's part
        of the sample lacks it. Any other key is a mistake of somebody's code, whose traceback
        tells more.
    """
    key = error.args[0] if error.args else None
    if key not in COLUMNS:
        return
    for module_id, columns in sample.items():
        if key not in columns:
            raise ValueError(
                f"the sample for module {module_id!r} has no column {key!r}, which {algorithm!r} "
                f"needs; it has {', '.join(sorted(columns))}"
            ) from error


def _checked(
    columns: Columns, validator: BatchValidator, module_id: str, *, remembers: bool
) -> Columns:
    arrays = {name: tree_map(_on_host, columns[name]) for name in columns if name in COLUMNS}
    episodes = validator.checked(batch_of_columns(arrays, module_id, remembers=remembers))
    must_be_finite(module_id, [episodes])
    own = {name: columns[name] for name in columns if name not in COLUMNS}
    for name, column in own.items():
        own[name] = tree_map(partial(_as_tensor, where=f"{module_id}: column {name!r}"), column)
    return {**own, **collate([episodes])}


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
