"""Games of PettingZoo that are installed train with defaults, as its own API tests play them.

`benchmarks/pettingzoo_games.py` trains each of them for 50,000 steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.place import Place, assert_books_balance, summary

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pettingzoo_games import games, why_not

pytestmark = [pytest.mark.slow]

STEPS = 2_000
#: One of each kind: in turn with masks, in turn for many, at once where agents die, at once with
#: different spaces. The others are left to the long tests.
OF_EACH_KIND = (
    "classic/connect_four_v3",
    "classic/hanabi_v5",
    "butterfly/knights_archers_zombies_v11",
    "mpe2/simple_world_comm_v3",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.long)
        for name in games()
    ],
)
@pytest.mark.long
def test_a_game_trains_with_defaults(place: Place, name: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    options = ["--stop-steps", STEPS, "--run-dir", "run"]
    train = ["train", "--env", f"pettingzoo:{name}", *options]
    run = place.run(*train, seconds=300, SDL_VIDEODRIVER="dummy")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    end = summary(place.path / "run")
    assert end["env_steps_trained"] >= STEPS
    assert end["restarts"] == 0
    for module in end["modules"].values():
        assert module["skipped"] == 0
    place.assert_nothing_is_left()
