"""Environments with several agents are recognized, and made with their options."""

from __future__ import annotations

import functools
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from support.scripted_games import ScriptedParallel, ScriptedTurns, ScriptedVector, drawn

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.make_envs import has_several_agents, make_multi_agent_envs
from juggler.runtime.install_commands import installing

CARTPOLES = "juggler:CartPoles"


class Mine(ScriptedParallel):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(drawn(seed, "parallel"))


class Wrapping:
    """A wrapper of PettingZoo's interface, which doubles rewards."""

    def __init__(self, env: Any, factor: float = 2.0) -> None:
        self.env, self.factor = env, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, actions: Any) -> Any:
        seen, rewards, *rest = self.env.step(actions)
        return seen, {agent: self.factor * each for agent, each in rewards.items()}, *rest


def a_function() -> Mine:
    return Mine()


def of_unknown() -> NoSuchClass:  # type: ignore[name-defined]  # noqa: F821
    return Mine()


@pytest.mark.parametrize(
    ("factory", "several"),
    [
        (ScriptedParallel, True),
        (ScriptedTurns, True),
        (ScriptedVector, True),
        (functools.partial(Mine, 3), True),
        (a_function, True),
        (of_unknown, False),
        (lambda: Mine(), False),
        (CartPoleEnv, False),
        (CartPoleVectorEnv, False),
        (gymnasium.Wrapper, False),
        (gymnasium.vector.VectorWrapper, False),
    ],
)
def test_several_agents_are_known_by_the_class(factory: Any, several: bool) -> None:
    assert has_several_agents(EnvRunnerConfig(), factory) == several


def test_a_function_that_hides_several_agents_is_told_how_to_show_them() -> None:
    with pytest.raises(ValueError, match="for several agents, write the class"):
        make_vector_env(EnvRunnerConfig(env="mine"), of_unknown)


class Listed:
    """A game with lists and dicts, instead of PettingZoo's methods."""

    agents = ("ann", "bob")
    observation_spaces = action_spaces = dict.fromkeys(agents, gymnasium.spaces.Discrete(2))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return dict.fromkeys(self.agents, 0), {}

    def step(self, actions: Any) -> Any:
        raise NotImplementedError


def test_a_game_without_possible_agents_from_a_function_is_told_how_to_show_them() -> None:
    class Bare(Listed):
        def observation_space(self, agent: str) -> Any:
            return self.observation_spaces[agent]

        action_space = observation_space

    with pytest.raises(ValueError, match="for several agents, write the class"):
        make_vector_env(EnvRunnerConfig(env="mine"), lambda: Bare())
    with pytest.raises(ValueError, match="Bare must have possible_agents"):
        make_multi_agent_envs(EnvRunnerConfig(env="mine"), lambda: Bare())


def test_a_game_that_lacks_methods_is_told_which() -> None:
    lacks = "lacks PettingZoo's methods observation_space and action_space$"
    with pytest.raises(ValueError, match=lacks):
        make_vector_env(EnvRunnerConfig(env="mine"), Listed)


def test_a_class_of_several_agents_in_a_run_that_knows_of_one_is_told_to_name_them() -> None:
    with pytest.raises(ValueError, match="name its agents in the run's table agents"):
        make_vector_env(EnvRunnerConfig(env="mine"), Mine)


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("pettingzoo:classic/connect_four_v3", True),
        (CARTPOLES, True),
        ("CartPole-v1", False),
        ("juggler.envrunner.memory_cartpole:MemoryCartPole-v0", False),
        ("gymnasium.envs.classic_control:CartPoleEnv", False),
        ("dm_env_rpc://localhost:1", False),
    ],
)
def test_several_agents_are_known_by_the_name(name: str, several: bool) -> None:
    assert has_several_agents(EnvRunnerConfig(env=name)) == several


def test_wrappers_of_pettingzoos_interface_wrap_every_environment() -> None:
    wrapper = {"use": f"{Wrapping.__module__}:Wrapping", "factor": 0.0}
    config = EnvRunnerConfig(env="mine", envs_per_runner=2, env_wrappers=[wrapper])
    sys.modules.setdefault(Wrapping.__module__, sys.modules[__name__])
    envs = make_multi_agent_envs(config, Mine)
    turn = envs.reset(0)
    for _ in range(10):
        (group,) = turn.groups
        assert not group.rewards.any()
        assert not group.last_rewards.any()
        turn = envs.step([np.asarray(group.observations) @ [100, 10, 1]])


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (Mine, {"vectorize": "async"}, "stepped in the"),
        (Mine, {"vectorize": "native"}, "use auto or sync"),
        (None, {"vectorize": "sync", "env": CARTPOLES}, "use auto or native"),
        (Mine, {"autoreset": "next_step"}, "begins its next episode within the step"),
        (Mine, {"env_wrappers": ["TimeLimit"]}, "TimeLimit is for environments"),
        (None, {"env": CARTPOLES, "env_wrappers": ["my:Own"]}, "env_wrappers wrap single"),
        (None, {"env": CARTPOLES, "env_kwargs": {"num_envs": 3}}, "set envs_per_runner instead"),
        (lambda: object(), {}, "must make an environment with"),
    ],
)
def test_options_that_mean_nothing_for_several_agents_are_refused(
    factory: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_multi_agent_envs(EnvRunnerConfig(**options), factory)


def test_without_pettingzoo_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ValueError, match="needs the package pettingzoo") as wrong:
        make_multi_agent_envs(EnvRunnerConfig(env="pettingzoo:classic/rps_v2"))
    assert installing("pettingzoo") in str(wrong.value)


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("classic/leduc_holdem_v4", "rlcard", "pip install 'pettingzoo[classic]'"),
        ("mpe2/simple_spread_v3", "mpe2", "pip install mpe2"),
    ],
)
def test_a_package_that_one_game_needs_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, command: str
) -> None:
    for each in [*sys.modules]:
        if each.startswith(("pettingzoo.classic", "rlcard", "mpe2")):
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"needs the package {module}") as wrong:
        make_multi_agent_envs(EnvRunnerConfig(env=f"pettingzoo:{name}"))
    assert command in str(wrong.value)


class Masked(ScriptedParallel):
    """Its infos have masks of three actions."""

    last = False
    given: Any = (0, 1, 1)

    def __init__(self) -> None:
        super().__init__(drawn(1, "parallel"))

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def infos(self) -> dict[str, Any]:
        return {agent: {"action_mask": np.array(self.given)} for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed)[0], self.infos()

    def step(self, actions: dict[str, Any]) -> Any:
        step = self._play()
        done = step.terminated | step.truncated
        before, self.agents = self.agents, [a for a in self.agents if a not in done]
        self.agents += self._newcomers()
        seen = {agent: self._see(agent) for agent in {*before, *self.agents}}
        ends = [
            {agent: agent in which for agent in seen} for which in (step.terminated, step.truncated)
        ]
        return seen, step.rewards, *ends, self.infos()


def test_masks_in_infos_become_part_of_the_observations() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(env="mine", envs_per_runner=2), lambda: Masked())
    (group,) = envs.groups
    assert isinstance(group.observation_space, spaces.Dict)
    assert list(group.observation_space.spaces) == ["action_mask", "observation"]
    assert group.observation_space["action_mask"] == spaces.MultiBinary(3)
    turn, ends = envs.reset(0), 0
    for _ in range(20):
        (now,) = turn.groups
        seen, last = now.observations, now.last_observations
        assert isinstance(seen, dict)
        assert isinstance(last, dict)
        assert seen["action_mask"].tolist() == [[0, 1, 1]] * len(now.acting)
        assert last["action_mask"].tolist() == [[1, 1, 1]] * len(now.ended)
        assert seen["observation"].shape == (len(now.acting), 3)
        ends += len(now.ended)
        turn = envs.step([np.ones(len(now.acting), np.int64)])
    assert ends > 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "had an action mask before, and"),
        ((0, 1), "the action mask in its info does not fit"),
        ((0, 2, 1), "other numbers than 0 and 1"),
    ],
)
def test_masks_in_infos_are_checked(given: Any, said: str) -> None:
    games: list[Masked] = []

    def make() -> Masked:
        games.append(Masked())
        return games[-1]

    envs = make_multi_agent_envs(EnvRunnerConfig(env="mine", envs_per_runner=2), make)
    envs.reset(0)
    games[1].given = given
    if given is None:
        games[1].infos = lambda: {}  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFailed, match=said) as failed:
        envs.reset(0)
    assert str(failed.value).startswith("environment 1 ")
