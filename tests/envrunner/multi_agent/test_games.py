"""Games of OpenSpiel and games of one choice, as environments."""

from __future__ import annotations

import numpy as np
import pytest

from juggler.envrunner.multi_agent.matrix_game import MatrixGame
from juggler.envrunner.multi_agent.openspiel import OpenSpielGame


def _played(game: OpenSpielGame, seed: int, moves: list[int]) -> dict[str, list[float]]:
    """By agent, what `last` told before each of its moves and at its end."""
    told: dict[str, list[float]] = {agent: [] for agent in game.possible_agents}
    game.reset(seed=seed)
    left = list(moves)
    while game.agents:
        agent = game.agent_selection
        seen, reward, terminated, truncated, _ = game.last()
        assert seen is not None
        assert game.observation_space(agent).contains(seen)
        assert not truncated
        told[agent].append(reward)
        game.step(None if terminated else left.pop(0))
    assert not left
    return told


def test_each_player_of_kuhn_poker_gets_what_the_cards_decide() -> None:
    game = OpenSpielGame("kuhn_poker")
    for seed in range(20):
        told = _played(game, seed, [1, 1])  # bet, call
        cards = game._state.history()[:2]
        won = 2.0 if cards[0] > cards[1] else -2.0
        assert told == {"player_0": [0.0, won], "player_1": [0.0, -won]}
    assert _played(game, 0, [0, 1, 0]) == {"player_0": [0.0, 0.0, -1.0], "player_1": [0.0, 1.0]}


def test_cards_are_dealt_by_the_seed_and_all_deals_come() -> None:
    game = OpenSpielGame("kuhn_poker")

    def deal(seed: int | None) -> tuple[int, ...]:
        game.reset(seed=seed)
        return tuple(game._state.history())

    assert deal(3) == deal(3)
    deal(0)
    assert len({deal(None) for _ in range(200)}) == 6


def test_a_mask_allows_what_openspiel_calls_legal() -> None:
    game = OpenSpielGame("connect_four")
    game.reset(seed=0)
    for _ in range(6):
        assert game.observe(game.agent_selection)["action_mask"][2] == 1
        game.step(2)
    seen = game.observe(game.agent_selection)
    assert seen["action_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1]
    other = next(agent for agent in game.agents if agent != game.agent_selection)
    assert not game.observe(other)["action_mask"].any()
    with pytest.raises(ValueError, match="moves 2, and may move"):
        game.step(2)


def test_moves_that_are_simultaneous_are_hidden_from_the_other_player() -> None:
    game = OpenSpielGame("matrix_rps")
    shown = []
    for move in range(3):
        game.reset(seed=0)
        game.step(move)
        assert game.agent_selection == "player_1"
        shown.append(game.observe("player_1")["observation"])
    assert np.array_equal(shown[0], shown[1])
    assert np.array_equal(shown[1], shown[2])
    assert _played(game, 0, [0, 1]) == {"player_0": [0.0, -1.0], "player_1": [0.0, 1.0]}


def test_a_game_that_draws_its_own_chance_is_dealt_by_the_seed() -> None:
    def deals(seeds: range) -> set[bytes]:
        found = set()
        for game, seed in zip(games, seeds, strict=True):
            game.reset(seed=seed)
            seen, *_ = game.last()
            assert seen is not None
            found.add(seen["observation"].tobytes())
        return found

    games = [OpenSpielGame("negotiation") for _ in range(8)]
    first = deals(range(8))
    assert len(first) > 6
    assert deals(range(100, 108)) != first
    assert deals(range(8)) == first, "the same seeds, once more"
    games = [OpenSpielGame("negotiation", rng_seed=1) for _ in range(8)]
    assert len(deals(range(8))) == 1, "a seed in the parameters counts"


def test_a_mean_field_game_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="'mfg_crowd_modelling' is a mean-field game"):
        OpenSpielGame("mfg_crowd_modelling")


def test_a_game_that_openspiel_lacks_is_told() -> None:
    with pytest.raises(ValueError, match="OpenSpiel cannot load the game 'kuhn_pocker'"):
        OpenSpielGame("kuhn_pocker")


def test_a_matrix_game_pays_by_its_table() -> None:
    game = MatrixGame([[3, -2], [-2, 1]])
    for row in range(2):
        for column in range(2):
            shown, _ = game.reset(seed=0)
            assert game.observation_space("row").contains(shown["row"])
            _, rewards, terminated, truncated, _ = game.step({"row": row, "column": column})
            assert rewards["row"] == [[3, -2], [-2, 1]][row][column] == -rewards["column"]
            assert terminated == {"row": True, "column": True}
            assert not any(truncated.values())
            assert game.agents == []


def test_tables_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="matrices of one shape"):
        MatrixGame([[1, 2]], [[1], [2]])
