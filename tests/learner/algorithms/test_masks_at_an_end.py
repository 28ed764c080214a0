"""Values of actions where an episode was cut off in a state without a legal action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.q_network import QNetwork

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
MASKED = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(2)})
MEMORY = {"recurrent": "gru", "recurrent_size": 4}


def seen(observations: Any, mask: int) -> dict[str, Any]:
    return {
        "observation": observations,
        "action_mask": np.full((*observations.shape[:-1], 2), mask, np.int8),
    }


def masked(batch: EpisodeBatch, at_ends: int) -> EpisodeBatch:
    """The batch with masks that are `at_ends` in final observations, and 1 elsewhere."""
    return replace(
        batch,
        observations=seen(batch.observations, 1),
        last_observations=seen(batch.last_observations, 1),
        final_observations=seen(batch.final_observations, at_ends),
        states={"module": {"hidden": np.zeros((len(batch.rewards), 4), np.float32)}},
    )


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("dqn", {}),
        ("dqn", {"double": False, "n_step": 1}),
        ("r2d2", {}),
        ("pqn", {}),
    ],
)
def test_a_final_observation_without_a_legal_action_is_worth_its_best_action(
    make_batch: MakeBatch, algorithm: str, keys: dict[str, Any]
) -> None:
    model = {"hidden_sizes": [8], **(MEMORY if algorithm == "r2d2" else {})}
    found = ALGORITHMS[algorithm]
    package, _, name = found.core.partition(":")
    core: Any = getattr(__import__(package, fromlist=[name]), name)(
        partial(QNetwork, MASKED, spaces.Discrete(2), model), found.config(**keys)
    )
    batch = make_batch(4, 12, seed=1, ends=0.3)
    assert len(batch.final_rows), "an episode is truncated"
    state, gradients = core.init(0), []
    for at_ends in (0, 1):
        sample = collate([masked(batch, at_ends)])
        gradient, aux = core.grads(state, sample)
        assert float(aux.metrics["value_loss"]) < 100
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)
