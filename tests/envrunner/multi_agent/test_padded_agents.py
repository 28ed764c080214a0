"""Agents with different spaces, from Tuples, and that come and go."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.find_environment import check_name
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.make_envs import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import GroupTurn, MultiAgentEnvs

BIG, SMALL = spaces.Box(-1, 9, (3,), np.float32), spaces.Box(2, 5, (2,), np.float32)


def box(*high: float) -> spaces.Box:
    return spaces.Box(0, np.array(high, np.float32))


class Unequal:
    """Agents in turns of their own, whose actions and observations are checked."""

    possible_agents = ("ant", "bear", "cat")

    def __init__(self, seen: list[Any], actions: list[Any]) -> None:
        own = map(copy.deepcopy, seen)  # each draws from a generator of its own
        self._seen = dict(zip(self.possible_agents, own, strict=True))
        self._actions = dict(zip(self.possible_agents, actions, strict=True))

    def observation_space(self, agent: str) -> Any:
        return self._seen[agent]

    def action_space(self, agent: str) -> Any:
        return self._actions[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        for i, agent in enumerate(self.agents):
            self._seen[agent].seed((seed or 0) + i)
        return self.see(), {}

    def see(self) -> dict[str, Any]:
        acting = [each for i, each in enumerate(self.agents) if (self.t + i) % 3]
        self.shown = {each: self._seen[each].sample() for each in acting}
        return self.shown

    def step(self, actions: dict[str, Any]) -> Any:
        for agent, action in actions.items():
            assert self._actions[agent].contains(action), (agent, action)
        self.t += 1
        rewards = {agent: float(np.sum(action)) for agent, action in actions.items()}
        ended = dict.fromkeys(self.possible_agents, self.t == 7)
        seen = {each: self._seen[each].sample() for each in self.agents} if self.t == 7 else None
        self.agents = [] if self.t == 7 else self.agents
        return seen or self.see(), rewards, ended, dict.fromkeys(ended, False), {}


def made(seen: list[Any], actions: list[Any], pad: bool, num_envs: int = 2) -> MultiAgentEnvs:
    def make() -> Unequal:
        return Unequal(seen, actions)

    config = EnvRunnerConfig(envs_per_runner=num_envs, pad_agents=pad)
    return make_multi_agent_envs(config, make)


def by_slot(groups: tuple[GroupTurn, ...], column: str, of: str = "acting") -> dict[int, Any]:
    """The rows of a column by slot."""
    rows = {}
    for group in groups:
        values = getattr(group, column)
        for row, slot in enumerate(getattr(group, of)):
            rows[int(slot)] = np.asarray(values)[row].tolist()
    return dict(sorted(rows.items()))


def test_rows_are_those_without_padding_in_the_order_of_slots() -> None:
    seen, actions = [BIG, SMALL, BIG], [spaces.Discrete(2), spaces.Discrete(4), spaces.Discrete(2)]
    plain, padded = made(seen, actions, False), made(seen, actions, True)
    (group,) = padded.groups
    assert group.agents == padded.agents == plain.agents
    assert group.action_space == spaces.Discrete(4)
    assert group.observation_space["observation"] == spaces.Box(
        np.array([-1, -1, -1], np.float32), np.array([9, 9, 9], np.float32)
    )
    one, other = plain.reset(3), padded.reset(3)
    ends = 0
    for _ in range(30):
        (got,) = other.groups
        assert (np.diff(got.acting) > 0).all()
        assert (np.diff(got.ended) > 0).all()
        for column in ("first", "rewards"):
            assert by_slot(other.groups, column) == by_slot(one.groups, column)
        for column in ("last_rewards", "terminated"):
            assert by_slot(other.groups, column, "ended") == by_slot(one.groups, column, "ended")
        for of, column in (("acting", "observations"), ("ended", "last_observations")):
            wanted = by_slot(one.groups, column, of)
            ends += of == "ended" and len(wanted)
            tree = getattr(got, column)
            for row, slot in enumerate(getattr(got, of)):
                own = np.zeros(3)
                own[: len(wanted[int(slot)])] = wanted[int(slot)]
                assert tree["observation"][row].tolist() == own.tolist()
                assert tree["action_mask"][row].tolist() == (
                    [1] * 4 if slot % 3 == 1 else [1, 1, 0, 0]
                )
        chosen = np.array([0, 3, 1])[got.acting % 3]
        split = [chosen[np.isin(got.acting, each.acting)] for each in one.groups]
        one, other = plain.step(split), padded.step([chosen])
        assert other.env_returns.tolist() == one.env_returns.tolist()
        assert other.agent_returns.tolist() == one.agent_returns.tolist()
    assert ends > 20


def test_parts_of_tuples_are_beside_the_masks_of_other_numbers_of_actions() -> None:
    seen = [spaces.Tuple([each, spaces.Discrete(5)]) for each in (BIG, SMALL, BIG)]
    actions = [spaces.Discrete(2), spaces.Discrete(4), spaces.Discrete(2)]
    plain, padded = made(seen, actions, False), made(seen, actions, True)
    wanted = by_slot(tuple(part_of(each, "1") for each in plain.reset(3).groups), "observations")
    (group,) = padded.reset(3).groups
    tree: Any = group.observations
    assert tree.keys() == {"observation", "action_mask"}
    assert (
        dict(zip(group.acting.tolist(), tree["observation"]["1"].tolist(), strict=True)) == wanted
    )
    assert tree["observation"]["0"].shape == (len(group.acting), 3)


def part_of(group: GroupTurn, key: str) -> GroupTurn:
    observations: Any = group.observations
    return replace(group, observations=observations[key])


def test_longer_actions_lose_their_ends() -> None:
    envs = made([BIG] * 3, [box(1, 2), box(1), box(1, 2, 3)], True)
    (group,) = envs.groups
    assert group.action_space == box(1, 2, 3)
    assert group.observation_space == BIG
    turn = envs.reset(0)
    for _ in range(10):
        turn = envs.step([np.tile(np.float32([0.5, 1.5, 2.5]), (len(turn.groups[0].acting), 1))])
    assert by_slot(turn.groups, "rewards")


def test_own_masks_and_parts_of_dicts_are_padded() -> None:
    dicts = [
        spaces.Dict({"a": spaces.Discrete(n), "action_mask": spaces.MultiBinary(n)})
        for n in (2, 3, 4)
    ]
    envs = made(dicts, [spaces.Discrete(n) for n in (2, 3, 4)], True)
    wanted = spaces.Dict({"a": spaces.Discrete(4), "action_mask": spaces.MultiBinary(4)})
    assert envs.groups[0].observation_space == wanted
    turn = envs.reset(0)
    masks = turn.groups[0].observations["action_mask"]
    for slot, mask in zip(turn.groups[0].acting, masks, strict=True):
        assert not mask[2 + slot % 3 :].any()


@pytest.mark.parametrize(
    ("seen", "actions"),
    [
        ([BIG, spaces.Box(-1, 9, (3, 1)), BIG], [spaces.Discrete(2)] * 3),
        ([BIG] * 3, [spaces.Discrete(2), spaces.Discrete(2, start=1), spaces.Discrete(2)]),
        ([BIG] * 3, [box(1, 2), box(2), box(1, 2)]),
        ([BIG] * 3, [spaces.Discrete(2), box(1), box(1)]),
    ],
    ids=["dimensions", "starts", "bounds", "kinds"],
)
def test_spaces_that_cannot_be_padded_are_named(seen: list[Any], actions: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"pad_agents: (observations|actions) of .* and .*"):
        made(seen, actions, True)


# Gymnasium environments whose spaces are Tuples have an agent for each part.


SEEN = spaces.Box(0, 100, (2,), np.float32)


class Counters(gymnasium.Env[Any, Any]):
    """Three agents count steps; agent i ends after i + 2."""

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


# Agents that are not known in advance get places, and come back as new agents.


#: Number of actions by agent, in the order of arrival.
LIVES = (2, 5, 1, 3, 4, 2, 3, 6)
EVERY = 2  # steps from one arrival to the next


class Traffic:
    """Cars with numeric names arrive one by one, and leave later."""

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
    """Agent "b" replaces "a", sees nothing, and ends; "c" stays."""

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
