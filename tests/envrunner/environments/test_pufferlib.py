"""PufferLib's native environments as a vector, with a stand-in package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments import find_environment
from juggler.envrunner.environments.autoreset import last_observation
from juggler.envrunner.environments.find_environment import check_name
from juggler.envrunner.environments.vector import make_vector_env, reset_environments
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.near_matches import closest

LENGTH = 3


class PufferEnv:
    """The arrays that PufferLib's class of this name makes."""

    num_agents: int

    def __init__(self) -> None:
        self.observations = np.zeros((self.num_agents, 2), np.float32)
        self.rewards = np.zeros(self.num_agents, np.float32)
        self.terminals = np.zeros(self.num_agents, np.bool_)
        self.truncations = np.zeros(self.num_agents, np.bool_)


class Steps(PufferEnv):
    """Episodes of three steps: agent i begins at i."""

    single_observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs: int = 1, agents: int = 1, truncates: bool = False) -> None:
        self.num_agents = num_envs * agents
        self.truncates, self.closed, self.seeds = truncates, False, list[int]()
        super().__init__()

    def reset(self, seed: int = 0) -> tuple[Any, list[Any]]:
        self.seeds.append(seed)
        self.observations[:] = 0
        self.observations[:, 0] = np.arange(self.num_agents) % LENGTH
        return self.observations, []

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.observations[:, 0] += 1
        self.observations[:, 1] = actions
        self.rewards[:] = actions
        ended = self.observations[:, 0] == LENGTH
        (self.truncations if self.truncates else self.terminals)[:] = ended
        self.observations[ended] = 0
        return (self.observations, self.rewards, self.terminals, self.truncations, [{"score": 1.0}])

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def pufferlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, with one environment, and one whose module is not there."""
    package, ocean, environment = map(
        ModuleType, ("pufferlib", "pufferlib.ocean", "pufferlib.ocean.environment")
    )
    package.PufferEnv = PufferEnv  # type: ignore[attr-defined]
    environment.MAKE_FUNCTIONS = {"steps": "Steps", "unbuilt": "Unbuilt"}  # type: ignore[attr-defined]
    environment.env_creator = lambda name: {  # type: ignore[attr-defined]
        "puffer_steps": Steps,
        "puffer_unbuilt": "Unbuilt",
    }[name]
    for module in (package, ocean, environment):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)


def made(**keys: Any) -> Any:
    return make_vector_env(
        EnvRunnerConfig(**{"env": "pufferlib:steps", "envs_per_runner": 4} | keys)
    )


def test_all_environments_step_in_one_call_and_begin_the_next_episode_within_it() -> None:
    env = made()
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    first = reset_environments(env, 7)
    assert first[:, 0].tolist() == [0, 1, 2, 0]
    observations, rewards, terminated, truncated, infos = env.step(np.array([1, 0, 1, 0]))
    assert observations.tolist() == [[1, 1], [2, 0], [0, 0], [1, 0]]
    assert rewards.tolist() == [1, 0, 1, 0]
    assert terminated.tolist() == [False, False, True, False]
    assert not truncated.any()
    assert infos == {}
    assert observations is env.unwrapped.env.observations, "nothing is copied"
    env.close()
    assert env.unwrapped.env.closed


def test_seeds_are_integers_of_c_and_differ_where_none_is_given() -> None:
    env = made()
    env.reset(seed=2**31 + 5)
    env.reset()
    env.reset()
    *_, given, one, other = env.unwrapped.env.seeds
    assert given == 5
    assert one != other


def test_a_class_of_ones_own_may_have_several_agents_each_of_which_is_an_environment() -> None:
    own = {"env": f"{__name__}:Steps", "env_kwargs": {"agents": 2}}
    with pytest.raises(ValueError, match="Steps makes 8 environments, and"):
        made(**own)
    env = made(**own | {"env_kwargs": {"agents": 2, "num_envs": 2}})
    assert env.num_envs == 4
    assert not isinstance(env.unwrapped, SyncVectorEnv)


def test_an_environment_that_pufferlib_lacks_is_named_with_the_nearest() -> None:
    check_name("pufferlib:steps")
    near = closest("step", ["steps", "unbuilt"])
    with pytest.raises(ValueError, match=f"no such environment: did you mean 'pufferlib:{near}'"):
        made(env="pufferlib:step")
    with pytest.raises(ValueError, match="no such environment: it has steps, unbuilt"):
        made(env="pufferlib:qqqqqq")
    with pytest.raises(ValueError, match="installed without this environment"):
        made(env="pufferlib:unbuilt")


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pufferlib.ocean.environment", None)
    with pytest.raises(ValueError, match="needs PufferLib, on every host"):
        made()
    monkeypatch.setattr(find_environment, "is_there", lambda module: module != "pufferlib")
    with pytest.raises(ValueError, match="no Python module 'pufferlib'"):
        check_name("pufferlib:steps")


def test_a_package_of_this_name_without_native_environments_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(sys.modules["pufferlib"], "PufferEnv")
    env = made(env="gymnasium.envs.classic_control:CartPoleEnv")
    assert isinstance(env.unwrapped, SyncVectorEnv)


def test_a_truncated_episode_without_its_last_observation_is_an_error() -> None:
    env = made(env_kwargs={"truncates": True})
    env.reset(seed=0)
    *_, truncated, infos = env.step(np.zeros(4, np.int64))
    assert truncated.tolist() == [False, False, True, False]
    with pytest.raises(EnvironmentFailed, match=r"truncated an episode .* without infos"):
        last_observation(env.single_observation_space, infos, 2)
