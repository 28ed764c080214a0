"""Learning from every kind of observation, action and memory.

Each task is far out of reach of chance. Some need a memory or a filter.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.place import REPOSITORY, Place, assert_books_balance, first_of, metrics, summary

pytestmark = pytest.mark.slow

FAST = {
    "num_env_runners": 1,
    "envs_per_runner": 32,
    "fragment_steps": 20,
    "batch_size": 640,
    "lr": 2e-3,
    "grad_clip": 0.5,
    # Nothing is left to be chosen by what the environment shows.
    "lambda_": 1.0,
    "value_lr_scale": 1.0,
    "connectors": {},
}
# Rows in which an episode goes on from the one before: states travel with them.
SEQUENCES = FAST | {"fragment_steps": 32, "batch_size": 1000}
MAZE = SEQUENCES | {"env": "support.toys:TMaze", "env_kwargs": {"length": 6}, "stop_steps": 800_000}
#: So long that a policy that forgets a little each step has lost the sign at its end.
LONG_MAZE = SEQUENCES | {
    "algorithm": "ppo",
    "env": "support.toys:TMaze",
    "env_kwargs": {"length": 20},
    "fragment_steps": 64,
    "batch_size": 2000,
    "lr": 1e-3,
    "lambda_": 0.95,
    "entropy_coefficient": 0.01,
    "stop_steps": 500_000,
}
CARTPOLE = SEQUENCES | {
    "env": "juggler.envrunner.memory_cartpole:MemoryCartPole-v0",
    "env_kwargs": {"max_episode_steps": 200},
    "reward_scale": 0.1,
    "stop_steps": 1_000_000,
}
BADLY_SCALED = FAST | {
    "env": "support.toys:BadlyScaled",
    "gamma": 0.5,
    "entropy_coefficient": 0.0,
    "stop_steps": 500_000,
}
R2D2_MAZE = {
    "algorithm": "r2d2",
    "env": "support.toys:TMaze",
    "env_kwargs": {"length": 20},
    "num_env_runners": 1,
    "envs_per_runner": 8,
    "fragment_steps": 64,
    "batch_size": 512,
    "lr": 1e-3,
    "model": {"recurrent": "lstm", "hidden_sizes": [64]},
    "stop_steps": 150_000,
}
MASKED = FAST | {"env": "support.toys:NextFree", "gamma": 0.5, "stop_steps": 500_000}
LSTM = {"model": {"recurrent": "lstm"}}
GRU = {"model": {"recurrent": "gru"}}

#: Settings that learn, and the return to be reached.
LEARNS: dict[str, tuple[dict[str, Any], float]] = {
    "a Box by default": (
        {"env": "support.toys:Valve", "algorithm": "ppo", "stop_steps": 60_000},
        8.0,
    ),
    "CartPole without velocities": (CARTPOLE | LSTM, 150.0),
    "a sign at the start of a maze, lstm": (MAZE | LSTM, 0.85),
    "a sign for twenty steps, gru": (LONG_MAZE | GRU, 0.85),
    "a sign for twenty steps, r2d2": (R2D2_MAZE, 0.85),
    "several choices": (
        FAST | {"env": "support.toys:Dials", "gamma": 0.5, "stop_steps": 500_000},
        17.0,
    ),
    "every part of a dict": (
        # With the default, one seed in some ten keeps to a policy that does not heed every part.
        FAST
        | {"env": "support.toys:Errand", "gamma": 0.9}
        | {"entropy_coefficient": 0.03, "stop_steps": 1_000_000},
        0.65,
    ),
    # The environment raises at an action that is not legal, and so the run would fail.
    "legal actions, masked in infos": (MASKED | {"env_kwargs": {"mask_in": "info"}}, 17.0),
    "legal actions, masked in observations": (
        MASKED | {"env_kwargs": {"mask_in": "observation"}},
        17.0,
    ),
    # Above 10 both numbers are needed: one that is large, and one that is tiny.
    "badly scaled observations, behind a filter": (
        BADLY_SCALED | {"connectors": {"env_to_module": ["mean_std_filter"]}},
        13.0,
    ),
    "images": (FAST | {"env": "support.toys:Catch", "stop_steps": 600_000}, 0.9),
}


def train(place: Place, seed: int, settings: dict[str, Any], says: str = "") -> list[float]:
    """Train with these settings; return the mean returns on the way."""
    arguments: list[object] = []
    for key, value in (settings | {"seed": seed, "run_dir": "run"}).items():
        text = json.dumps(value) if isinstance(value, dict) else value
        name = key if key.endswith("_") else key.replace("_", "-")
        arguments += [f"--{name}", text]
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests"}
    run = place.run("train", *arguments, **path)
    assert run.status == 0, run.output
    assert says in run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
    lines = [*metrics(place.path / "run"), summary(place.path / "run")]
    returns = [line["episode_return_mean"] for line in lines]
    return [value for value in returns if value is not None]


@pytest.mark.parametrize("name", first_of(LEARNS))
@pytest.mark.parametrize("seed", first_of(range(3)))
def test_it_is_learned(place: Place, name: str, seed: int) -> None:
    settings, goal = LEARNS[name]
    returns = train(place, seed, settings | {"stop_return": goal})
    end = summary(place.path / "run")
    assert end["solved"], returns
    assert end["confirmation"]["return_mean"] >= goal


def test_a_run_whose_actions_are_clipped_to_one_bound_says_so(place: Place) -> None:
    settings = {"env": "support.toys:Valve", "algorithm": "ppo", "connectors": {}}
    said = "Set connectors.module_to_env"
    assert max(train(place, 0, settings | {"stop_steps": 8_000}, said)) < -15
    assert metrics(place.path / "run")[-1]["modules"]["default"]["clipped_actions"] > 0.95
