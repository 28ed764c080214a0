"""Games without an end: a limit ends them, or a warning appears."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import Turn

AGENTS = ["ann", "bob"]


class Endless:
    """Two agents act at once, forever; observations are step numbers."""

    possible_agents = AGENTS

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, np.inf, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(AGENTS), 0
        return self.seen(), {}

    def seen(self) -> dict[str, Any]:
        return dict.fromkeys(AGENTS, np.array([self.at], np.float32))

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        no = dict.fromkeys(AGENTS, False)
        return self.seen(), {"ann": 1.0, "bob": -0.5}, no, dict(no), {}


class EndsAlone(Endless):
    """Ann's episode ends with step 2."""

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, over, cut, infos = super().step(actions)
        if self.at == 2:
            over["ann"], self.agents = True, ["bob"]
        return seen, {agent: rewards[agent] for agent in actions}, over, cut, infos


class EndlessTurns:
    """Agents in turn, forever, or Ann alone; each move pays 1."""

    possible_agents = AGENTS
    observation_space, action_space = Endless.observation_space, Endless.action_space

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.at = list(AGENTS), 0
        self.agent_selection = "ann"
        self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
        self.infos: dict[str, Any] = {agent: {} for agent in AGENTS}

    def observe(self, agent: str) -> Any:
        return np.array([self.at], np.float32)

    def last(self) -> Any:
        agent = self.agent_selection
        return self.observe(agent), self._cumulative_rewards[agent], False, False, {}

    def step(self, action: Any) -> None:
        self.at += 1
        self._cumulative_rewards[self.agent_selection] = 0.0
        for agent in AGENTS:
            self._cumulative_rewards[agent] += 1.0
        if not self.alone or self.at < 2:
            self.agent_selection = AGENTS[self.at % 2]
        else:
            self.agent_selection = "ann"


def play(envs: GamesInTurn, steps: int) -> list[Turn]:
    turns = [envs.reset(0)]
    for _ in range(steps):
        acting = [len(group.acting) for group in turns[-1].groups]
        turns.append(envs.step([np.zeros(count, np.int64) for count in acting]))
    return turns


def test_a_limit_truncates_all_agents_that_are_there() -> None:
    envs = GamesInTurn([ParallelGame(Endless(), 0, limit=3)], "Endless")
    turns = play(envs, 7)
    overs = [number for number, turn in enumerate(turns) if len(turn.over)]
    assert overs == [3, 6]
    for turn in (turns[3], turns[6]):
        (group,) = turn.groups
        assert group.ended.tolist() == [0, 1]
        assert group.terminated.tolist() == [False, False]
        assert np.asarray(group.last_observations).tolist() == [[3.0], [3.0]]
        assert group.last_rewards.tolist() == [1.0, -0.5]
        assert (turn.env_lengths.tolist(), turn.env_returns.tolist()) == ([3], [1.5])
        assert turn.agent_returns.tolist() == [[3.0, -1.5]]
        assert np.asarray(group.observations).tolist() == [[0.0], [0.0]], "the next episode"


def test_an_agent_that_has_ended_is_not_truncated_again() -> None:
    envs = GamesInTurn([ParallelGame(EndsAlone(), 0, limit=4)], "EndsAlone")
    turns = play(envs, 4)
    assert [turn.groups[0].ended.tolist() for turn in turns] == [[], [], [0], [], [1]]
    assert turns[2].groups[0].terminated.tolist() == [True]
    assert turns[4].groups[0].terminated.tolist() == [False]


@pytest.mark.parametrize("limit", [4, 5])
def test_a_limit_gives_agents_that_are_not_on_turn_what_they_have_yet_to_hear(limit: int) -> None:
    envs = GamesInTurn([TurnBasedGame(EndlessTurns(), 0, limit)], "EndlessTurns")
    turns = play(envs, limit)
    (group,) = turns[limit].groups
    assert group.ended.tolist() == [0, 1]
    assert group.terminated.tolist() == [False, False]
    assert np.asarray(group.last_observations).tolist() == [[limit], [limit]]
    # The last player to move has one move's reward, the other player two moves' rewards.
    assert group.last_rewards.tolist() == ([2.0, 1.0] if limit % 2 == 0 else [1.0, 2.0])
    assert turns[limit].over.tolist() == [0]
    assert turns[limit].env_lengths.tolist() == [limit]
    assert turns[limit].agent_returns.tolist() == [[limit, limit]], "the first move pays both, too"


def test_a_limit_needs_to_know_what_agents_have_yet_to_hear() -> None:
    class Silent(EndlessTurns):
        def last(self) -> Any:
            return self.observe("ann"), 0.0, False, False, {}

        def step(self, action: Any) -> None:
            self.__dict__.pop("_cumulative_rewards", None)

    envs = GamesInTurn([TurnBasedGame(Silent(), 0, 2)], "Silent")
    with pytest.raises(EnvironmentFailed, match="max_episode_steps needs the"):
        play(envs, 2)


def test_the_key_of_a_configuration_is_such_a_limit() -> None:
    config = EnvRunnerConfig(env="mine:Endless", envs_per_runner=2, max_episode_steps=5)
    envs = make_multi_agent_envs(config, Endless)
    assert isinstance(envs, GamesInTurn)
    assert [turn.over.tolist() for turn in play(envs, 5)] == [[]] * 5 + [[0, 1]]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_episode_steps": 0}, "must be an integer of at least 1, not 0"),
        ({"max_episode_steps": 5, "gateway": "h:1"}, "have them truncate their episodes"),
        ({"max_episode_steps": 5, "env": "envpool:Pong-v5"}, "have them truncate their episodes"),
        (
            {"max_episode_steps": 5, "env_kwargs": {"max_episode_steps": 5}},
            "is in env_kwargs, too: leave out",
        ),
    ],
)
def test_a_limit_that_cannot_hold_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="max_episode_steps") as refused:
        EnvRunnerConfig(**keys).validate()
    assert words in str(refused.value)


def test_games_that_are_stepped_as_arrays_have_a_limit_of_their_own() -> None:
    config = EnvRunnerConfig(env="juggler:CartPoles", max_episode_steps=5)
    with pytest.raises(ValueError, match="CartPoles steps all of its"):
        make_multi_agent_envs(config)


REMEDY = "max_episode_steps = 1000 truncates all agents after that many steps"


def test_people_are_told_of_an_agent_that_does_not_end() -> None:
    games = [ParallelGame(Endless(), 0, 40), ParallelGame(EndsAlone(), 1)]
    envs = GamesInTurn(games, "EndsAlone")
    play(envs, 79)
    assert envs.overdue(80) == ""
    play(envs, 80)
    assert envs.overdue(80) == (
        "waits for agent 'bob' of environment 1 (EndsAlone), which has not ended within 80 steps "
        f"of one episode: {REMEDY}"
    )
    assert envs.overdue(81) == ""


def test_people_are_told_of_an_agent_that_is_never_on_turn_again() -> None:
    envs = GamesInTurn([TurnBasedGame(EndlessTurns(alone=True), 0)], "EndlessTurns")
    play(envs, 19)
    assert envs.overdue(20) == ""
    play(envs, 22)
    assert envs.overdue(20) == (
        "waits for agent 'bob' of environment 0 (EndlessTurns), which has neither acted nor ended "
        f"in the last 20 steps of one episode: {REMEDY}"
    )


def test_an_episode_is_very_long_only_beside_those_before() -> None:
    envs = GamesInTurn([ParallelGame(Endless(), 0, 100)], "Endless")
    play(envs, 199)
    assert envs.overdue(50) == ""
