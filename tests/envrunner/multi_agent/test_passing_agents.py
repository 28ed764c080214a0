"""Agents that are not known in advance get places, and come back as new agents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs

#: Number of actions by agent, in the order of arrival.
LIVES = (2, 5, 1, 3, 4, 2, 3, 6)
EVERY = 2  # steps from one arrival to the next


class Traffic:
    """Cars with numbers for names arrive one by one, and leave after their lives."""

    def __init__(self, places: int = 4, again: bool = False) -> None:
        self.max_num_agents, self.again = places, again

    def observation_space(self, agent: Any) -> Any:
        return spaces.Box(0, 100, (2,), np.float64)

    def action_space(self, agent: Any) -> Any:
        return spaces.Box(0, 1000, (), np.float64)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.left = 0, {0: LIVES[0]}
        self.agents = [0]
        return self.see([0]), {}

    def see(self, agents: Any) -> Any:
        return {agent: np.array([agent, self.left[agent]], np.float64) for agent in agents}

    def step(self, actions: Any) -> Any:
        assert actions == {agent: 10 * agent + self.left[agent] for agent in self.agents}
        self.t += 1
        rewards = {agent: 1.0 + agent for agent in actions}
        for agent in self.agents:
            self.left[agent] -= 1
        ended = {agent: self.left[agent] == 0 for agent in actions}
        there = [agent for agent in self.agents if not ended[agent]]
        new, late = divmod(self.t, EVERY)
        if not late and new < len(LIVES):
            name = 0 if self.again and 0 not in self.agents else new
            self.left[name] = LIVES[new]
            there.append(name)
            rewards[name] = 0.5  # from before its first action
        seen = self.see({*actions, *there})
        self.agents = there
        return seen, rewards, ended, dict.fromkeys(ended, False), {}


@pytest.mark.parametrize("again", [False, True], ids=["other names", "one name comes back"])
def test_each_agent_has_its_own_episode_at_a_place(again: bool) -> None:
    config = EnvRunnerConfig(envs_per_runner=2, env_kwargs={"again": again})
    envs = make_multi_agent_envs(config, Traffic)
    assert envs.agents == ("agent_0", "agent_1", "agent_2", "agent_3")
    turn, lives, open_lives = envs.reset(0), [], {}
    while not len(turn.over):
        (now,) = turn.groups
        for slot, first, reward in zip(now.acting.tolist(), now.first, now.rewards, strict=True):
            if first:
                assert slot not in open_lives
                open_lives[slot] = []
            else:
                open_lives[slot].append(reward)
        turn = envs.step([now.observations @ [10, 1]])
        (now,) = turn.groups
        assert now.terminated.all()
        for slot, reward in zip(now.ended.tolist(), now.last_rewards, strict=True):
            lives.append([*open_lives.pop(slot), reward])
    assert sorted(map(len, lives)) == sorted(2 * LIVES)
    if not again:
        wanted = [[1.0 + i] * LIVES[i] for i in range(len(LIVES))]
        assert sorted(lives) == sorted([*wanted, *wanted])
    total = sum(map(sum, lives)) / 2 + 0.5 * (len(LIVES) - 1)
    assert turn.env_returns.tolist() == [total, total]
    assert np.nansum(turn.agent_returns, 1).tolist() == [total, total]


class Shy(Traffic):
    """Agent "b" comes to the place of "a", sees nothing, and ends; "c" stays."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, ["a", "c"]
        return dict.fromkeys(self.agents, np.zeros(2)), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        self.agents = [["c"], ["b", "c"], ["c"], []][self.t - 1]
        over = {1: ["a"], 3: ["b"], 4: ["c"]}.get(self.t, [])
        known = {*actions, *over}
        seen = dict.fromkeys({"c", *over}, np.zeros(2))
        ended = {agent: agent in over for agent in known}
        return seen, dict.fromkeys(known, 1.0), ended, dict.fromkeys(known, False), {}


def test_a_newcomer_that_ends_before_it_acts_leaves_no_trace() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(envs_per_runner=1), lambda: Shy(2))
    turn, ended = envs.reset(0), []
    for _ in range(4):
        (group,) = turn.groups
        turn = envs.step([np.zeros(len(group.acting))])
        ended += turn.groups[0].ended.tolist()
    assert ended == [0, 1]
    assert turn.env_returns.tolist() == [6.0]
    assert turn.agent_returns.tolist() == [[2.0, 4.0]]


def test_too_many_agents_name_the_number_of_places() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(envs_per_runner=1), lambda: Traffic(1))
    envs.reset(0)
    envs.step([np.array([2.0])])
    with pytest.raises(EnvironmentFailed, match="no free place among max_num_agents = 1"):
        envs.step([np.array([1.0])])


@pytest.mark.parametrize("places", [0, "4", None])
def test_the_number_of_places_is_checked(places: Any) -> None:
    with pytest.raises(ValueError, match="max_num_agents must be an integer of at least 1"):
        make_multi_agent_envs(EnvRunnerConfig(envs_per_runner=1), lambda: Traffic(places))
