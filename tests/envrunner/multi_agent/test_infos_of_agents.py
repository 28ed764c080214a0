"""Numbers of infos in environments with several agents, with any interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.scripted_agents import sampler_of

from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.info_numbers import MOST_EPISODES, InfoNumber, InfoNumbers
from juggler.envrunner.multi_agent.games import Game, GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.runtime.episodes.version import Version

SEES = spaces.Box(-1, 1, (3,), np.float32)
ACTS = spaces.Discrete(3)
SEEN = np.zeros(3, np.float32)
HOSTILE = {
    "name": "text",
    "nan": float("nan"),
    "huge": 1e308,
    "endless": 10**400,
    "array": np.ones(2),
    "nested": {"x": 1.0},
    "_hidden": 1.0,
    "bad\n": 1.0,
    "n" * 101: 1.0,
    "action_mask": None,
    7: 1.0,
    None: 1.0,
}


class Parallel:
    """Episodes of three steps; "b" ends early, with infos afterwards."""

    def __init__(self, agents: tuple[str, ...] = ("a", "b")) -> None:
        self.possible_agents, self.agents = agents, list(agents)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return SEES

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTS

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, SEEN), {agent: {"step": 1000} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        gone = {agent for agent in actions if self.at == 3 or (self.at == 2 and agent == "b")}
        self.agents = [agent for agent in self.agents if agent not in gone]
        return (
            dict.fromkeys(actions, SEEN),
            dict.fromkeys(actions, 1.0),
            {agent: agent in gone for agent in actions},
            dict.fromkeys(actions, False),
            self.infos(),
        )

    def infos(self) -> dict[Any, Any]:
        late = {"won": True} if self.at == 2 else {"step": 1e6} if self.at == 3 else {}
        b = {"step": np.float32(10 * self.at), **HOSTILE, **late}
        return {"a": {"step": self.at}, "b": b, "common": {"step": 1e6}, "c": {"step": 1e6}}


class InTurns:
    """Two players move twice each, and share one info dict."""

    possible_agents = ("a", "b")

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.infos: dict[str, Any] = {agent: {} for agent in self.possible_agents}
        self._cumulative_rewards = dict.fromkeys(self.possible_agents, 0.0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return SEES

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTS

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.moves = list(self.possible_agents), 0
        for info in self.infos.values():
            info.update({"moves": 1000, **HOSTILE})
        self.agent_selection = "a"

    def observe(self, agent: str) -> Any:
        return SEEN

    def last(self) -> Any:
        agent = self.agent_selection
        return SEEN, 0.0, self.moves >= 4, False, self.infos[agent]

    def step(self, action: Any) -> None:
        if action is None:
            self.agents.remove(self.agent_selection)
            self.agent_selection = self.agents[0] if self.agents else "a"
            return
        self.moves += 1
        self.infos[self.agent_selection]["moves"] = (self.moves + 1) // 2
        self.agent_selection = self.possible_agents[self.moves % 2]


class Vector(MultiAgentVectorEnv):
    """Episodes of three steps; a reset overwrites the infos' memory."""

    agents = ("a", "b")
    observation_space, action_space = SEES, ACTS

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._at = 0
        self._told, self._given = np.zeros((num_envs, 2)), np.ones((num_envs, 2), bool)

    def reset(self, seed: int | None, which: np.ndarray) -> Any:
        self._at = 0
        self._told[:] = 1e6
        return np.zeros((self.num_envs, 2, 3), np.float32), np.ones((self.num_envs, 2), bool)

    def step(self, actions: Any) -> VectorStep:
        self._at += 1
        self._told[:] = self._at * np.array([1, 10])
        self._given[:, 1] = self._at < 3
        over = np.full((self.num_envs, 2), self._at == 3)
        seen = np.zeros((self.num_envs, 2, 3), np.float32)
        rewards = np.ones((self.num_envs, 2))
        return VectorStep(seen, rewards, over, np.zeros_like(over), ~over, self.infos())

    def infos(self) -> Any:
        odd = {"flat": np.ones(self.num_envs), "text": "x", "what": np.full((2, 2), None), 7: 1.0}
        return {"step": self._told, "_step": self._given, "nan": self._told * np.nan, **odd}


def parallel() -> MultiAgentEnvs:
    games: list[Game] = [ParallelGame(Parallel(), index) for index in range(2)]
    return GamesInTurn(games, "Parallel")


def in_turns() -> MultiAgentEnvs:
    games: list[Game] = [TurnBasedGame(InTurns(), index) for index in range(2)]
    return GamesInTurn(games, "InTurns")


def vector() -> MultiAgentEnvs:
    return VectorTurns(Vector(2), "Vector")


def told(envs: MultiAgentEnvs, fragment: int, steps: int) -> InfoNumbers:
    sampler = sampler_of(envs, dict.fromkeys(envs.agents, "m"), fragment)
    found: InfoNumbers = {}
    for _ in range(steps // fragment):
        infos = sampler.sample({"m"}, {"m": Version(1, 0)}).infos
        for name, episodes in infos.items():
            found.setdefault(name, []).extend(episodes)
    return found


A, B = InfoNumber(2.0, 1.0, 3.0), InfoNumber(15.0, 10.0, 20.0)


@pytest.mark.parametrize("fragment", [1, 4, 24])
@pytest.mark.parametrize(
    ("make", "episode", "numbers"),
    [
        (parallel, 3, {"a/step": A, "b/step": B, "b/won": InfoNumber(1.0, 1.0, 1.0)}),
        (in_turns, 4, dict.fromkeys(("a/moves", "b/moves"), InfoNumber(1.5, 1.0, 2.0))),
        (vector, 3, {"a/step": A, "b/step": B}),
    ],
)
def test_each_agents_numbers_count_from_its_first_action_to_its_end(
    make: Callable[[], MultiAgentEnvs], episode: int, numbers: dict[str, InfoNumber], fragment: int
) -> None:
    count = 2 * (24 // episode)
    assert told(make(), fragment, 24) == {name: [each] * count for name, each in numbers.items()}


def test_an_agent_that_a_limit_truncates_tells_its_numbers_too() -> None:
    envs = GamesInTurn([TurnBasedGame(InTurns(), 0, 3)], "InTurns")
    whole, short = InfoNumber(1.5, 1.0, 2.0), InfoNumber(1.0, 1.0, 1.0)
    assert told(envs, 3, 6) == {"a/moves": [whole] * 2, "b/moves": [short] * 2}


def test_a_new_start_drops_what_running_episodes_gave() -> None:
    sampler = sampler_of(parallel(), {"a": "m", "b": "m"}, 2)
    assert sampler.sample({"m"}, {"m": Version(1, 0)}).infos == {}
    sampler.reset(1)
    assert sampler.sample({"m"}, {"m": Version(1, 0)}).infos == {}
    infos = sampler.sample({"m"}, {"m": Version(1, 0)}).infos
    assert infos["a/step"] == [A, A]


def test_of_many_agents_nothing_says_which_of_them_gave_a_number() -> None:
    class Crowd(Parallel):
        def infos(self) -> Any:
            return {agent: {"step": self.at} for agent in self.possible_agents}

    names = tuple(f"agent_{k}" for k in range(40))
    found = told(GamesInTurn([ParallelGame(Crowd(names), 0)], "Crowd"), 12, 12)
    assert found == {"step": [A] * MOST_EPISODES}  # of 160 episodes of agents


@pytest.mark.parametrize("agents", [("a", "b\n"), ("a", "b" * 101)])
def test_an_agent_whose_name_cannot_be_told_is_not_named(agents: tuple[str, ...]) -> None:
    class Same(Parallel):
        def infos(self) -> Any:
            return {agent: {"step": self.at} for agent in self.possible_agents}

    found = told(GamesInTurn([ParallelGame(Same(agents), 0)], "Same"), 3, 3)
    assert found == {"step": [A] * 2}


def test_numbers_of_two_agents_never_have_one_name() -> None:
    class Slashes(Parallel):
        def infos(self) -> Any:
            longer = {"x": 2.0, "b/x": 3.0}
            return {"a": {"x": 4.0, "b/x": 1.0, "c/x": 5.0}, "a/b": longer}

    found = told(GamesInTurn([ParallelGame(Slashes(("a", "a/b")), 0)], "Slashes"), 3, 3)
    assert {name: each[0].mean for name, each in found.items()} == {
        "a/x": 4.0,
        "a/c/x": 5.0,
        "a/b/x": 2.0,
    }


@pytest.mark.parametrize("info", [None, 3.0, "text", [1.0], np.ones(2)])
def test_an_info_that_is_no_dict_is_an_error(info: Any) -> None:
    class Odd(Parallel):
        def infos(self) -> Any:
            return {"a": info, "b": {"step": 1.0}}

    kind = type(info).__name__
    with pytest.raises(EnvironmentFailed, match=f"info of agent 'a' must be a dict, and .* {kind}"):
        told(GamesInTurn([ParallelGame(Odd(), 0)], "Odd"), 3, 3)


@pytest.mark.parametrize("infos", [None, 3.0, np.ones((2, 2))])
def test_a_vector_whose_infos_are_no_dict_is_told_so(infos: Any) -> None:
    class Odd(Vector):
        def infos(self) -> Any:
            return infos

    with pytest.raises(EnvironmentFailed, match="its infos must be a dict of arrays by name"):
        told(VectorTurns(Odd(2), "Odd"), 3, 3)


class Misnamed(InTurns):
    """A step has a number under a name that is no agent."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.infos["touches"] = 1.0


def test_what_nothing_reads_in_infos_is_told_whatever_the_interface() -> None:
    def first_turns(envs: MultiAgentEnvs) -> list[str]:
        """Unread values after a reset and after a step, as text."""
        began = envs.reset(0)
        turns = began, envs.step([np.zeros(len(began.groups[0].acting), int)])
        return [turn.unread for turn in turns]

    no_agent = "no agent is called so: nothing reads that. Infos have a dict for each agent, as in"
    assert first_turns(parallel()) == ["", f"'c' and 'common', and {no_agent} {{'a': {{...}}}}"]
    assert first_turns(in_turns()) == ["", ""]
    misnamed = GamesInTurn([TurnBasedGame(Misnamed(), 0)], "Misnamed")
    assert first_turns(misnamed) == ["", f"'touches', and {no_agent} {{'a': {{...}}}}"]
    assert first_turns(vector()) == [
        "",
        "'flat' and '7', and no array of the shape [2, 2] there: nothing reads that. Infos have "
        "arrays [num_envs, agents] by name",
    ]
