"""Random samples of any module, and a random environment for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.sampler import Sampler
from juggler.learner.core.learner_core import Columns
from juggler.learner.data.collate import collate
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.modules.rl_module import RLModule


def sample_for(module: RLModule, rows: int = 4, steps: int = 8, seed: int = 0) -> Columns:
    """Sample random observations with a module, in episodes of 2-12 steps.

    Args:
        module: chooses the actions.
        rows: N
        steps: T
        seed: of observations and actions.
    """
    observations, actions = module.observation_space, module.action_space
    config = EnvRunnerConfig(envs_per_runner=rows, fragment_steps=steps, vectorize="sync")
    env = make_vector_env(config, partial(AnythingEnv, observations, actions))
    env_to_module, module_to_env = build_runner_pipelines(ConnectorsConfig(), observations, actions)
    policy = Actor(module, rows, steps, seed, module_to_env, env_to_module)
    return collate([Sampler(env, policy, steps, seed).sample((0, 0)).batch])


class AnythingEnv(gymnasium.Env[Any, Any]):
    """An environment of random observations of any space.

    If the space has action masks, at least one action is legal, and illegal ones are an error.
    """

    def __init__(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> None:
        self.observation_space, self.action_space = observations, actions

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(2, 12))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._legal is None or self._legal[action], f"{action} is an illegal action"
        self._left -= 1
        ends = self._left == 0
        reward = float(self.np_random.normal())
        by_truncation = bool(self.np_random.integers(2))
        return self._shown(), reward, ends and not by_truncation, ends and by_truncation, {}

    def _shown(self) -> Any:
        observation, self._legal = self.observation_space.sample(), None
        if isinstance(observation, dict) and ACTION_MASK in observation:
            self._legal = observation[ACTION_MASK]
            self._legal[int(self.np_random.integers(len(self._legal)))] = 1
        return observation
