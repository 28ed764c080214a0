"""A sample without content, which shows what those of a run will look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from juggler.learner.data.collate import collate
from juggler.learner.data.sources import Columns
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.episodes.columns import batch_of_columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

Space = gymnasium.Space[Any]

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
        critic_space: of what the value function sees beside observations; None: nothing.
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
