"""Does it learn? Shipped settings and spaces, seed by seed, against thresholds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.place import (
    REPOSITORY,
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    first_of,
    metrics,
    seeds,
    summary,
    trained_steps,
)

import juggler
from juggler.driver.config_files import read_shipped
from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.runtime.checkpoints.checkpoint import read


def solved_at(run_dir: Path) -> int | None:
    """Steps until the training return first reached 475, or None."""
    lines = metrics(run_dir)
    solved = (line for line in lines if (line["episode_return_mean"] or 0.0) >= 475)
    return next((int(line["env_steps_trained"]) for line in solved), None)


@pytest.mark.slow
@seeds
def test_cartpole_is_solved_and_stays_solved(place: Place, seed: int) -> None:
    """After 475, training stays at 400 for a million steps."""
    options = ["--run-dir", "run", "--seed", seed, "--stop-return", 501, "--stop-steps", 2_500_000]
    evaluations = ["--evaluation-seconds", 1, "--evaluation-episodes", 20]
    run = place.start("train", "cartpole", *options, *evaluations)

    def long_after() -> bool:
        time.sleep(0.5)  # reading many lines takes the run's time
        since = solved_at(place.path / "run")
        later = since is not None and trained_steps(place.path / "run") > since + 1_000_000
        return later or run.status is not None

    eventually(long_after, 300, lambda: run.output)
    if run.status is None:
        run.interrupt()
    assert run.wait(60) in (0, 130), run.output
    place.assert_nothing_is_left()
    assert_books_balance(place.path / "run")
    lines = metrics(place.path / "run")
    curve = [(line["env_steps_trained"], line["episode_return_mean"] or 0.0) for line in lines]
    solved = solved_at(place.path / "run")
    assert solved is not None, curve
    assert solved <= 1_200_000, curve
    fallen = [(steps, value) for steps, value in curve if steps >= solved and value < 400]
    assert not fallen, curve
    # A line has the newest evaluation, which may be of a policy of some time ago.
    for name, settled in (("episode_return_mean", 300_000), ("evaluation_return_mean", 500_000)):
        returns = [(line["env_steps_trained"], line[name]) for line in lines]
        after = [(steps, value) for steps, value in returns if steps > solved + settled]
        assert after[-1][0] > solved + 1_000_000
        assert min(value for _, value in after) >= 400, (name, after)
    end = summary(place.path / "run")  # an idle machine drops none; a runner may be delayed briefly
    assert end["env_steps_dropped"].get("stale", 0) <= 0.01 * end["env_steps_trained"]


# Each algorithm learns, and each shipped configuration.


#: As large as what ships.
DQN = {"hidden_sizes": [64, 64], "activation": "relu", "dueling": True}
ATOMS: dict[str, Any] = {"atoms": 51, "v_min": 0.0, "v_max": 20.0}

#: Arguments of `juggler train`, the return to be reached, and the steps that it may take.
LEARNS: dict[str, tuple[tuple[object, ...], float, int]] = {
    "ppo synchronously": (("cartpole", "--algorithm", "ppo", "--synchronous"), 475, 1_000_000),
    "dqn": (("cartpole", "--algorithm", "dqn"), 475, 150_000),
    "dqn with dueling atoms": (
        ("cartpole", "--algorithm", "dqn", "--model", json.dumps(DQN | ATOMS)),
        220,
        60_000,
    ),
    "ppo": (("cartpole", "--algorithm", "ppo"), 475, 500_000),
    "appo": (("cartpole", "--algorithm", "appo"), 475, 500_000),
    "pqn": (("cartpole", "--algorithm", "pqn"), 475, 500_000),
    "ppo in a Box": (("pendulum", "--algorithm", "ppo"), -300, 1_500_000),
    "sac": (("pendulum", "--algorithm", "sac"), -200, 150_000),
    "sac of choices": (("cartpole", "--algorithm", "sac"), 475, 150_000),
    "td3": (("pendulum", "--algorithm", "td3"), -200, 60_000),
    "compiled": (("cartpole", "--compile"), 100, 1_000_000),
    "bfloat16": (("cartpole", "--precision", "bfloat16"), 100, 1_000_000),
    "acrobot": (("acrobot",), -100, 3_000_000),
    "pendulum": (("pendulum",), -300, 3_000_000),
    "hopper": (("hopper",), 300, 5_000_000),
    "lunarlander": (("lunarlander",), -50, 5_000_000),
    "memory-cartpole": (("memory-cartpole",), 250, 5_000_000),
    "mountaincar-continuous": (("mountaincar-continuous",), 80, 5_000_000),
}
#: The slow tests try this, and the long tests the others.
SLOW = ("ppo synchronously",)


def skip_without_its_packages(name: str) -> None:
    try:
        check_extra(read_shipped(name).config.env_runner.env)
    except ValueError as error:
        pytest.skip(str(error))


def train(place: Place, *options: object) -> dict[str, Any]:
    run = place.run("train", *options, "--run-dir", "run")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    return summary(place.path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in SLOW else pytest.mark.long) for each in LEARNS]
)
@seeds
def test_it_learns(place: Place, name: str, seed: int) -> None:
    options, goal, steps = LEARNS[name]
    skip_without_its_packages(str(options[0]))
    end = train(place, *options, "--seed", seed, "--stop-return", goal, "--stop-steps", steps)
    assert end["solved"], metrics(place.path / "run")
    assert end["confirmation"]["return_mean"] >= goal
    if "--synchronous" in options:
        assert end["staleness_max"] == 0
    if "--compile" in options:
        assert metrics(place.path / "run")[-1]["modules"]["default"]["compiled_calls"] >= 1
    else:  # what was compiled stays in the temporary directory for the next run
        place.assert_nothing_is_left()


@pytest.mark.slow
def test_two_runners_and_a_learner_hold_the_ratio_that_they_are_told(place: Place) -> None:
    """Ape-X's shape: priorities, exploration ladder, and eight draws per step."""
    begin, drawn, ratio = 1000, 64, 8.0
    replay = ("--replay-begin", begin, "--replay-batch-size", drawn, "--replay-ratio", ratio)
    ladder = ("--exploration-epsilon", 0.4, "--exploration-ladder", 7, "--priority-exponent", 0.6)
    options = ("--num-env-runners", 2, "--envs-per-runner", 8, *replay, *ladder)
    limits = ("--stop-return", 501, "--stop-steps", 25_000)
    end = train(place, "cartpole", "--algorithm", "dqn", *options, *limits)
    assert end["num_env_runners"] == 2
    told = end["modules"]["default"]["samples_per_insert"]
    assert abs(told / ratio - 1) < 0.05
    # By Adam's own count of its steps, which knows nothing of a replay.
    state: Any = read(checkpoints(place.path / "run")[-1]).tree["default"]
    steps = int(state["moments"]["updates"])
    assert abs(steps * drawn / (end["env_steps_trained"] - begin) / ratio - 1) < 0.05
    place.assert_nothing_is_left()


# Players that learn against each other come near an equilibrium.


@pytest.mark.slow
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


@pytest.mark.slow
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


# Learning from every kind of observation, action and memory. Each task is far out of reach of
# chance. Some need a memory or a filter.


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
LEARNS_FROM: dict[str, tuple[dict[str, Any], float]] = {
    "a Box by default": (
        {"env": "support.toys:Valve", "algorithm": "ppo", "stop_steps": 60_000},
        8.0,
    ),
    "CartPole without velocities": (CARTPOLE | LSTM, 150.0),
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
    # Above 10 both numbers are needed: one that is large, and one that is tiny.
    "badly scaled observations, behind a filter": (
        BADLY_SCALED | {"connectors": {"env_to_module": ["mean_std_filter"]}},
        13.0,
    ),
    "images": (FAST | {"env": "support.toys:Catch", "stop_steps": 600_000}, 0.9),
}


def train_with(place: Place, settings: dict[str, Any], says: str = "") -> list[float]:
    """Train with these settings; return the mean returns on the way."""
    arguments: list[object] = []
    for key, value in (settings | {"seed": 0, "run_dir": "run"}).items():
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


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(LEARNS_FROM))
def test_it_is_learned(place: Place, name: str) -> None:
    settings, goal = LEARNS_FROM[name]
    returns = train_with(place, settings | {"stop_return": goal})
    end = summary(place.path / "run")
    assert end["solved"], returns
    assert end["confirmation"]["return_mean"] >= goal


@pytest.mark.slow
def test_a_run_whose_actions_are_clipped_to_one_bound_says_so(place: Place) -> None:
    settings = {"env": "support.toys:Valve", "algorithm": "ppo", "connectors": {}}
    said = "Set connectors.module_to_env"
    assert max(train_with(place, settings | {"stop_steps": 8_000}, said)) < -15
    assert metrics(place.path / "run")[-1]["modules"]["default"]["clipped_actions"] > 0.95


# Runs with a reward for what is new.


PATH = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/examples"}
#: Whose treasure random actions find once in 2^19 episodes, and which is a return of 0.99.
SEA = ("--env", "intrinsic_reward:DeepSea", "--num-env-runners", 1)
SETTINGS: dict[str, tuple[object, ...]] = {
    "impala": (
        *("--envs-per-runner", 16, "--fragment-steps", 24, "--batch-size", 384),
        *("--lr", 0.003, "--gamma", 0.97, "--entropy-coefficient", 0.003, "--connectors", "{}"),
        *("--model", '{"hidden_sizes": [64]}'),
    ),
    "dqn": ("--n-step", 1),
}
COEFFICIENTS = {"impala": 0.3, "dqn": 0.1}
GAMMAS = {"impala": 0.97, "dqn": 0.99}


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "goal", "steps"),
    [
        ("impala", 0.9, 300_000),
        ("dqn", 0.5, 40_000),  # of 18 actions one in twenty is drawn at random
    ],
)
def test_a_treasure_in_the_deep_sea_is_found_by_what_is_new_alone(
    place: Place, algorithm: str, goal: float, steps: int
) -> None:
    begin = ("train", *SEA, "--algorithm", algorithm, *SETTINGS[algorithm], "--synchronous")
    table = {"coefficient": COEFFICIENTS[algorithm], "gamma_int": GAMMAS[algorithm]}
    stops = ("--stop-return", goal, "--stop-steps", steps)
    curious = ("--run-dir", "curious", "--intrinsic", json.dumps(table))
    run = place.run(*begin, *stops, *curious, **PATH)
    assert run.status == 0, run.output
    assert summary(place.path / "curious")["solved"], run.output
    reached = summary(place.path / "curious")["env_steps_trained"]
    run = place.run(*begin, "--stop-steps", reached, "--run-dir", "plain", **PATH)
    assert run.status == 0, run.output
    found = [line["episode_return_mean"] or 0.0 for line in metrics(place.path / "plain")]
    assert max(found) < 0.05, "found without it"
