"""A sample without content, which shows what those of a run will look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from juggler.learner.data.collate import collate
from juggler.learner.data.sources import Sample
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.episodes.columns import batch_of_columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

_STEPS = 32


Space = gymnasium.Space[Any]


def example_sample(
    spaces: Mapping[str, tuple[Space, Space]],
    pipelines: Mapping[str, LearnerPipeline],
    states: Mapping[str, Mapping[str, Tree]],
    critic_spaces: Mapping[str, Space],
) -> Sample:
    """A row of an episode for each module, after the context connectors of its pipeline.

    Args:
        spaces: by module id, the module's spaces of observations and of actions.
        pipelines: of some modules.
        states: by module id, of one row, as from `Learner.example_states`.
        critic_spaces: by module id, of what its value function sees beside observations, if it
            does.
    """
    found = {}
    for module_id, (seen, acts) in spaces.items():
        pipeline, own = pipelines.get(module_id), states.get(module_id, {})
        stored = pipeline.stored_space if pipeline else seen
        columns = _columns(stored, acts, own, critic_spaces.get(module_id))
        found[module_id] = pipeline.in_context(columns) if pipeline else columns
    return found


def _columns(
    observation_space: Space,
    action_space: Space,
    states: Mapping[str, Tree],
    critic_space: Space | None,
) -> dict[str, Any]:
    """One row of an episode that goes on, as `collate` makes it."""
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
