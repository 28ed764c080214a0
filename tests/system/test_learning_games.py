"""Players that learn against each other come near an equilibrium."""

from __future__ import annotations

import numpy as np
import pytest
from support.place import Place, assert_books_balance
from support.seeds import seeds

import juggler

pytestmark = pytest.mark.slow

# Each player gives its two choices equal worth for the other one if it makes the first of them in 3
# of 8 games. The two are not symmetric: what is good for one is bad for the other, so that one
# policy for both would learn nothing.
TWO_BY_TWO = """
env = "juggler:MatrixGame"
env_kwargs = {payoffs = [[3, -2], [-2, 1]]}
algorithm = "ppo"
synchronous = true      # the same numbers every time
num_env_runners = 1
envs_per_runner = 32
fragment_steps = 16
batch_size = 512
epochs = 1
minibatches = 2
clip = 0.1
value_coefficient = 0.5
lr = [[0, 1e-3], [50_000, 2e-4], [100_000, 0.0]]
adam_betas = [0.0, 0.999]
entropy_coefficient = [[0, 0.5], [100_000, 0.1]]
stop_steps = 200_000

[connectors]
learner = []

[agents]
row = "row"
column = "column"
"""


@pytest.mark.timeout(600)
@seeds
def test_both_players_of_a_game_of_two_choices_learn_how_often_to_make_each(
    place: Place, seed: int
) -> None:
    place.write("game.toml", TWO_BY_TWO)
    options = ["--seed", seed, "--run-dir", "run"]
    run = place.run("train", "game.toml", *options, seconds=500)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    for player in ("row", "column"):
        policy = juggler.load_policy(place.path / "run", module_id=player)
        chances = policy.probabilities(np.ones(1, np.float32))  # [2]
        np.testing.assert_allclose(chances, [3 / 8, 5 / 8], atol=0.05)
