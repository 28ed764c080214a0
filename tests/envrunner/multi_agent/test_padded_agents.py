"""Agents with different spaces are padded to equal ones, and keep what is theirs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
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
