"""CartPole with hidden velocities is CartPole in everything but what is seen."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env

NAME = "juggler.envrunner.memory_cartpole:MemoryCartPole-v0"


@pytest.mark.parametrize("vectorize", ["native", "sync"])
def test_its_episodes_are_those_of_cartpole_without_the_velocities(vectorize: str) -> None:
    hidden, plain = (
        make_vector_env(EnvRunnerConfig(env=env, envs_per_runner=3, vectorize=vectorize))  # type: ignore[arg-type]
        for env in (NAME, "CartPole-v1")
    )
    seen, _ = hidden.reset(seed=3)
    everything, _ = plain.reset(seed=3)
    assert hidden.single_observation_space.shape == (2,)
    ends = 0
    for step in range(60):
        np.testing.assert_array_equal(seen, everything[:, ::2])
        assert hidden.observation_space.contains(seen)
        actions = np.full(3, step // 2 % 3 == 0, np.int64)  # [3]
        seen, *rest, _ = hidden.step(actions)
        everything, *others, _ = plain.step(actions)
        for mine, theirs in zip(rest, others, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        ends += int(rest[1].sum())
    assert ends > 0
    hidden.close()
    plain.close()


def test_an_episode_has_500_steps_at_most_as_in_cartpole() -> None:
    gymnasium.make(NAME).close()  # registers it
    spec = gymnasium.spec("MemoryCartPole-v0")
    assert spec.max_episode_steps == gymnasium.spec("CartPole-v1").max_episode_steps
