"""Matches between given players."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.typing import NDArray

from juggler.driver.line_ups import PlayedMatches
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.making import make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.policies.matches import Match, RandomPlayer, Record, play_matches, records
from juggler.runtime.wire.trees import Tree

BOX, MOVES = Box(0, 1, (1,), np.float32), Discrete(2)
MATRIX = "juggler.envrunner.multi_agent.matrix_game:MatrixGame"


class Always:
    """A player that always chooses the same action."""

    def __init__(self, action: int) -> None:
        self.action = action

    def act(self, slots: Sequence[int], observations: Tree, first: NDArray[np.bool_]) -> Tree:
        return np.full(len(slots), self.action)


def _envs(env: str, **kwargs: Any) -> MultiAgentEnvs:
    return make_multi_agent_envs(EnvRunnerConfig(env=env, envs_per_runner=3, env_kwargs=kwargs))


def test_matches_end_as_the_table_of_the_game_says() -> None:
    envs = _envs(MATRIX)
    matches = play_matches(envs, {"row": Always(1), "column": Always(0)}, 5, seed=0)
    assert matches == [Match({"row": 1.0, "column": -1.0}, {"row": 1, "column": 1})] * 5
    assert records(matches)["row"] == Record(1.0, 0.0, 5, 0, 0)
    assert records(matches)["column"] == Record(-1.0, 0.0, 0, 0, 5)


def test_a_player_in_a_game_of_turns_gets_what_the_cards_decide() -> None:
    envs = _envs("open_spiel:kuhn_poker")
    bets = {agent: Always(1) for agent in envs.agents}
    matches = play_matches(envs, bets, 400, seed=1)
    assert {tuple(match.returns.values()) for match in matches} == {(2.0, -2.0), (-2.0, 2.0)}
    assert {tuple(match.steps.values()) for match in matches} == {(1, 1)}
    won = records(matches)["player_0"]
    assert won.draws == 0
    assert abs(won.score - 0.5) < 0.08, "either card is the higher one equally often"


def test_random_play_of_connect_four_is_legal_and_the_first_player_wins_more() -> None:
    envs = _envs("open_spiel:connect_four")
    players = {
        agent: RandomPlayer(envs.groups[0].action_space, seed)
        for seed, agent in enumerate(envs.agents)
    }
    matches = play_matches(envs, players, 300, seed=0)
    first = records(matches)["player_0"]
    # 55.6 % wins, 0.3 % draws and 44.1 % losses are known for random play.
    assert 0.47 < first.score < 0.64
    low, high = first.interval()
    assert low < first.score < high < low + 0.13
    assert all(abs(sum(match.returns.values())) == 0 for match in matches)


def test_random_actions_follow_masks_of_several_parts_and_leave_the_space_alone() -> None:
    space = MultiDiscrete([3, 2], seed=7)
    expected = MultiDiscrete([3, 2], seed=7).sample()
    player = RandomPlayer(space, seed=1)
    masks = np.tile(np.array([1, 0, 1, 1, 1], np.int8), (200, 1))  # [200, 3 + 2]
    seen = {"observation": np.zeros((200, 1)), "action_mask": masks}
    drawn = player.act(range(200), seen, np.ones(200, np.bool_))  # [200, 2]
    found = {tuple(row) for row in np.asarray(drawn).tolist()}
    assert found == {(0, 0), (0, 1), (2, 0), (2, 1)}
    np.testing.assert_array_equal(space.sample(), expected)


def test_played_matches_are_shown_with_a_line_for_each_agent() -> None:
    played = [Match({"row": 1.0, "column": -1.0}, {})] * 3 + [Match({"row": 0, "column": 0}, {})]
    players = {"row": "main", "column": "random"}
    shown = PlayedMatches(Path("run/1"), players, played, records(played), [])
    assert str(shown) == repr(shown)
    assert str(shown).splitlines() == [
        "checkpoint: run/1",
        "column (random): return -0.75 (standard error 0.25); 0 won, 1 drawn, 3 lost: "
        "score 0.12 (95 %: 0.01 to 0.60)",
        "row (main): return 0.75 (standard error 0.25); 3 won, 1 drawn, 0 lost: "
        "score 0.88 (95 %: 0.40 to 0.99)",
    ]


def test_one_match_says_nothing_of_how_much_returns_vary() -> None:
    played = [Match({"row": 1.0, "column": -1.0}, {})]
    players = {"row": "main", "column": "random"}
    shown = PlayedMatches(Path("run/1"), players, played, records(played), [])
    assert str(shown).splitlines()[2] == (
        "row (main): return 1.00; 1 won, 0 drawn, 0 lost: score 1.00 (95 %: 0.21 to 1.00)"
    )


def test_an_agent_without_a_player_is_named() -> None:
    with pytest.raises(ValueError, match="nobody"):
        play_matches(_envs(MATRIX), {"row": Always(0)}, 1, seed=0)


class Gift:
    """Each of two players moves once; the first move gives the second player 2, then 1 back."""

    possible_agents = ("p0", "p1")

    def observation_space(self, agent: str) -> Box:
        return BOX

    def action_space(self, agent: str) -> Discrete:
        return MOVES

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection = ["p0", "p1"], "p0"
        self.sums, self.over = {"p0": 0.0, "p1": 0.0}, False

    def last(self) -> Any:
        return np.zeros(1, np.float32), self.sums[self.agent_selection], self.over, False, {}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if action is None:
            self.agents.remove(agent)
        elif agent == "p0":
            self.sums["p0"], self.sums["p1"] = 0.0, 2.0
        else:
            self.sums["p1"], self.sums["p0"], self.over = 0.0, self.sums["p0"] + 1.0, True
        self.agent_selection = next((each for each in self.agents if each != agent), agent)


def test_rewards_before_an_agents_first_action_count_in_its_matches() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(envs_per_runner=2), Gift)
    matches = play_matches(envs, {"p0": Always(0), "p1": Always(0)}, 4, seed=0)
    assert matches == [Match({"p0": 1.0, "p1": 2.0}, {"p0": 1, "p1": 1})] * 4
    assert records(matches)["p1"].wins == 4


def test_members_of_a_team_win_together() -> None:
    def results(returns: dict[str, float], **rule: Any) -> dict[str, tuple[int, int, int]]:
        found = records([Match(returns, dict.fromkeys(returns, 1))], **rule)
        return {agent: (each.wins, each.draws, each.losses) for agent, each in found.items()}

    won, drawn, lost = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    shared = {"a": 1.0, "b": 1.0, "c": -1.0, "d": -1.0}
    expected = {"a": won, "b": won, "c": lost, "d": lost}
    assert results(shared) == expected
    teams = [["a", "b"], ["c", "d"]]
    assert results(shared, teams=teams) == expected
    assert results({"a": 3.0, "b": -2.0, "c": 0.0, "d": 0.0}, teams=teams) == expected
    assert results({"a": 2.0, "c": 1.0, "d": 1.0}, teams=teams) == dict.fromkeys("acd", drawn)
    assert results({"a": 2.0, "c": 1.0}, margin=1.0) == dict.fromkeys("ac", drawn)
