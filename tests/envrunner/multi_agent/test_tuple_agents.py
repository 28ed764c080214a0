"""Gymnasium environments whose spaces are Tuples have an agent for each part."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.find_environment import check_name
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.interfaces import has_several_agents
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs

SEEN = spaces.Box(0, 100, (2,), np.float32)


class Counters(gymnasium.Env[Any, Any]):
    """Three agents count their steps; agent i ends after i + 2, or all after 4."""

    def __init__(self, apart: bool = False, agents: int = 3) -> None:
        self.apart, self.agents = apart, agents
        self.observation_space = spaces.Tuple([SEEN] * agents)
        self.action_space = spaces.Tuple([spaces.Discrete(5)] * agents)

    def see(self) -> Any:
        return tuple(np.array([self.t, i], np.float32) for i in range(self.agents))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.see(), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        assert len(actions) == self.agents
        if not self.apart:
            return self.see(), list(map(float, actions)), self.t == 4, False, {"t": self.t}
        ended = [self.t >= i + 2 for i in range(self.agents)]
        rewards = [float(a) * (self.t <= i + 2) for i, a in enumerate(actions)]
        infos = [{"t": self.t}] * self.agents
        return self.see(), rewards, ended, [False] * self.agents, infos


gymnasium.register("CountingAgents-v0", f"{__name__}:Counters")


def config(**given: Any) -> EnvRunnerConfig:
    return EnvRunnerConfig(env="tuples:CountingAgents-v0", envs_per_runner=1, **given)


def play_a_step() -> None:
    envs = make_multi_agent_envs(config())
    envs.reset(0)
    envs.step([np.zeros(3, np.intp)])


def test_the_name_says_that_there_are_several_agents() -> None:
    assert has_several_agents(config())
    check_name("tuples:CountingAgents-v0")
    with pytest.raises(ValueError, match="CountingAgent-v0"):
        check_name("tuples:CountingAgent-v0")


@pytest.mark.parametrize("apart", [False, True], ids=["one end", "an end for each"])
def test_each_part_is_an_agent(apart: bool) -> None:
    envs = make_multi_agent_envs(config(env_kwargs={"apart": apart}))
    assert envs.agents == ("agent_0", "agent_1", "agent_2")
    (group,) = envs.groups
    assert (group.observation_space, group.action_space) == (SEEN, spaces.Discrete(5))
    turn, sums = envs.reset(0), np.zeros(3)
    while not len(turn.over):
        (now,) = turn.groups
        assert now.observations[:, 1].tolist() == now.acting.tolist()
        turn = envs.step([now.acting + 1])
        (now,) = turn.groups
        sums[now.ended] += now.terminated
    lengths = [2, 3, 4] if apart else [4, 4, 4]
    assert turn.agent_returns.tolist() == [[(i + 1) * n for i, n in enumerate(lengths)]]
    assert turn.env_lengths.tolist() == [4]
    assert sums.tolist() == [1, 1, 1]
    assert turn.infos["t"][2] == 4


@pytest.mark.parametrize(
    ("call", "returned", "words"),
    [
        ("reset", ([np.zeros(2)], {}), "observations must have a part for each of 3 agents"),
        ("step", ([np.zeros(2)] * 3, [1.0], False, False, {}), "rewards must have a part"),
        ("step", ([np.zeros(2)] * 3, [1.0] * 3, [True], False, {}), "terminated must have"),
        ("step", ([np.zeros(2)] * 3, 1.0, False, False, None), "infos must have a part"),
    ],
)
def test_the_number_of_parts_is_checked(
    call: str, returned: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counters, call, lambda *_, **__: returned)
    with pytest.raises(EnvironmentFailed, match=words):
        play_a_step()


def test_an_environment_with_one_agent_is_refused() -> None:
    one = EnvRunnerConfig(env="tuples:CartPole-v1", envs_per_runner=1)
    with pytest.raises(EnvironmentFailed, match="leave out 'tuples:'"):
        make_multi_agent_envs(one)
