"""Does it learn from every kind of observation, with every kind of action, and remember?

Each task is far out of reach of chance. Where something is needed to learn it (a memory, a filter),
the same run without that fails with the same number of steps.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.place import REPOSITORY, Place, assert_books_balance, metrics, summary
from support.seeds import first_of, seeds

pytestmark = pytest.mark.slow

MEMORIES = [("lstm", 0), ("gru", 0), ("lstm", 1), ("lstm", 2)]

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
#: So long that who forgets a little with each step has forgotten the sign at its end.
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


def train(place: Place, seed: int, settings: dict[str, Any], says: str = "") -> list[float]:
    """A run of these settings that says this -> the mean returns that it reports in its course."""
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


def assert_learned(place: Place, seed: int, settings: dict[str, Any], threshold: float) -> None:
    returns = train(place, seed, settings | {"stop_return": threshold})
    end = summary(place.path / "run")
    assert end["solved"], returns
    assert end["confirmation"]["return_mean"] >= threshold


def assert_failed(place: Place, settings: dict[str, Any], bound: float) -> None:
    """It makes all of its steps and never gets to the bound."""
    returns = train(place, 0, settings)
    assert summary(place.path / "run")["env_steps_trained"] >= settings["stop_steps"]
    assert max(returns) < bound, returns


@seeds
@pytest.mark.long
def test_cartpole_without_velocities_is_solved_by_a_memory(place: Place, seed: int) -> None:
    assert_learned(place, seed, CARTPOLE | {"model": {"recurrent": "lstm"}}, 150.0)


@pytest.mark.long
def test_cartpole_without_velocities_is_not_solved_without_one(place: Place) -> None:
    assert_failed(place, CARTPOLE, 100.0)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seed"), MEMORIES)
def test_a_sign_at_the_start_of_a_maze_is_remembered_to_its_end(
    place: Place, kind: str, seed: int
) -> None:
    assert_learned(place, seed, MAZE | {"model": {"recurrent": kind}}, 0.85)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seed"), MEMORIES)
def test_a_sign_is_remembered_for_twenty_steps(place: Place, kind: str, seed: int) -> None:
    assert_learned(place, seed, LONG_MAZE | {"model": {"recurrent": kind}}, 0.85)


@seeds
@pytest.mark.long
def test_a_sign_is_remembered_for_twenty_steps_by_r2d2(place: Place, seed: int) -> None:
    settings = {
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
    assert_learned(place, seed, settings, 0.85)


@pytest.mark.long
def test_the_sign_is_not_known_at_the_end_without_a_memory(place: Place) -> None:
    assert_failed(place, MAZE, 0.5)


@seeds
@pytest.mark.long
def test_actions_of_several_choices_are_learned(place: Place, seed: int) -> None:
    settings = FAST | {"env": "support.toys:Dials", "gamma": 0.5, "stop_steps": 500_000}
    assert_learned(place, seed, settings, 17.0)


@seeds
@pytest.mark.long
def test_every_part_of_a_dict_is_read(place: Place, seed: int) -> None:
    settings = FAST | {
        "env": "support.toys:Errand",
        "gamma": 0.9,
        # With the default, one seed in some ten keeps to a policy that does not heed every part.
        "entropy_coefficient": 0.03,
        "stop_steps": 1_000_000,
    }
    assert_learned(place, seed, settings, 0.65)


@pytest.mark.parametrize(
    ("mask_in", "seed"),
    first_of([("info", 0), ("observation", 0), ("observation", 1), ("observation", 2)]),
)
@pytest.mark.long
def test_only_legal_actions_are_chosen_and_the_best_of_them_learned(
    place: Place, mask_in: str, seed: int
) -> None:
    """The environment raises at one that is not, and a run whose environment raises fails."""
    settings = FAST | {
        "env": "support.toys:NextFree",
        "env_kwargs": {"mask_in": mask_in},
        "gamma": 0.5,
        "stop_steps": 500_000,
    }
    assert_learned(place, seed, settings, 17.0)


@pytest.mark.long
@seeds
def test_badly_scaled_observations_are_learned_from_behind_a_filter(
    place: Place, seed: int
) -> None:
    """Above 10 both numbers are needed: one that is large, and one that is tiny."""
    connectors = {"env_to_module": ["mean_std_filter"]}
    assert_learned(place, seed, BADLY_SCALED | {"connectors": connectors}, 13.0)


@pytest.mark.long
def test_badly_scaled_observations_are_not_learned_from_as_they_are(place: Place) -> None:
    assert_failed(place, BADLY_SCALED, 5.0)


@seeds
@pytest.mark.long
def test_images_are_learned_from(place: Place, seed: int) -> None:
    settings = FAST | {"env": "support.toys:Catch", "stop_steps": 600_000}
    assert_learned(place, seed, settings, 0.9)


@seeds
def test_actions_far_from_zero_are_learned_by_default(place: Place, seed: int) -> None:
    settings = {"env": "support.toys:Valve", "algorithm": "ppo", "stop_steps": 60_000}
    assert_learned(place, seed, settings, 8.0)


def test_a_run_whose_actions_are_clipped_to_one_bound_says_so(place: Place) -> None:
    settings = {"env": "support.toys:Valve", "algorithm": "ppo", "connectors": {}}
    said = "Set connectors.module_to_env"
    assert max(train(place, 0, settings | {"stop_steps": 8_000}, said)) < -15
    assert metrics(place.path / "run")[-1]["modules"]["default"]["clipped_actions"] > 0.95
