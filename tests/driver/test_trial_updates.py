"""The update that is tried before a run with an algorithm of one's own begins."""

from __future__ import annotations

from typing import Any

import pytest
from support.algorithms import acts_in_choices, keeps_steps, needs_memory

from juggler.driver.config import RunConfig
from juggler.driver.rehearsal import build_one
from juggler.driver.trial_updates import rounds_of_batches
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.episodes.version import DEFAULT_MODULE


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_of_no_algorithm_that_ships_would_be_refused(algorithm: str) -> None:
    env = "CartPole-v1" if acts_in_choices(algorithm) else "Pendulum-v1"
    keys: dict[str, Any] = {"algorithm": algorithm, "env": env, "fragment_steps": 16}
    keys["model"] = {"hidden_sizes": [8]}
    if keeps_steps(algorithm):
        keys |= {"replay_begin": 8, "replay_batch_size": 8, "replay_ratio": 1.0}
    if needs_memory(algorithm):
        keys["model"] = {"hidden_sizes": [8], "recurrent": "gru"}
    config = RunConfig.from_flat(keys)
    vector = make_vector_env(config.env_runner, just_one=True)
    spaces = vector.single_observation_space, vector.single_action_space
    built = build_one(config, AgentGroup((), *spaces), None, None, {})
    more = (
        round[DEFAULT_MODULE]
        for round in rounds_of_batches(config, vector, {DEFAULT_MODULE: built})
    )
    for _ in range(3):
        assert built.try_update(next(more), more) == ""
    assert built.learner.updates == 3
    vector.close()
