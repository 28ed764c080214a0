"""Policies that are loaded from runs act in the environments of these runs."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

import juggler


@pytest.mark.parametrize(
    ("env", "connectors"),
    [
        ("Pendulum-v1", {"module_to_env": ["rescale_actions"]}),
        ("FrozenLake-v1", {"env_to_module": ["one_hot"]}),
    ],
)
@pytest.mark.usefixtures("local_workers")
def test_a_loaded_policy_has_the_spaces_of_the_environment(
    tmp_path: Path, env: str, connectors: dict[str, list[str]]
) -> None:
    run = juggler.train(
        env=env,
        connectors=connectors,
        stop_steps=2000,
        num_env_runners=1,
        run_dir=str(tmp_path / "run"),
        progress="off",
    )
    policy = juggler.load_policy(run.run_dir)
    made = gymnasium.make(env)
    assert policy.observation_space == made.observation_space
    assert policy.action_space == made.action_space
    observation, _ = made.reset(seed=0)
    actions = [np.asarray(policy.act(observation, explore=True)[0]) for _ in range(50)]
    assert all(made.action_space.contains(action) for action in actions)
    if env == "Pendulum-v1":
        assert max(np.abs(action).max() for action in actions) > 1, "else they are the module's"
