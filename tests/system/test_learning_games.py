"""Players that learn against each other come near an equilibrium."""

from __future__ import annotations

import numpy as np
import pytest
from support.place import Place, assert_books_balance, seeds

import juggler

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@seeds
@pytest.mark.long
def test_both_players_of_a_game_of_two_choices_learn_how_often_to_make_each(
    place: Place, seed: int
) -> None:
    # Each player gives its two choices equal worth for the other one if it makes the first of them
    # in 3 of 8 games.
    run = place.run("train", "two-by-two", "--seed", seed, "--run-dir", "run", seconds=500)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    for player in ("row", "column"):
        policy = juggler.load_policy(place.path / "run", module_id=player)
        chances = policy.probabilities(np.ones(1, np.float32))  # [2]
        np.testing.assert_allclose(chances, [3 / 8, 5 / 8], atol=0.05)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_policy_that_only_met_itself_beats_random_moves_on_either_side(place: Place) -> None:
    pytest.importorskip("pettingzoo")
    options = ["--seed", 0, "--stop-steps", 100_000, "--run-dir", "run"]
    run = place.run("train", "connect-four", *options, seconds=1_000)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    for side, other in (("player_0", "player_1"), ("player_1", "player_0")):
        players = {side: "default", other: "random"}
        played = juggler.play_matches(place.path / "run", players, episodes=200, seed=1)
        assert played.records[side].wins >= 0.9 * 200, side
