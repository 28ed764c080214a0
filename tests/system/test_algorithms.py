"""Do PPO, APPO, PQN, DQN, SAC and TD3 learn, as IMPALA does in test_learning.py? The shipped
settings, seed by seed, against thresholds; and stretches of training with memories, masks and
maps.

What IMPALA learns of these in test_learning_spaces.py is left to the long tests here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.place import (
    REPOSITORY,
    Place,
    assert_books_balance,
    checkpoints,
    metrics,
    summary,
)
from support.seeds import first_of, left_to_long, seeds

from juggler.runtime.checkpoints.checkpoint import read

pytestmark = pytest.mark.slow

algorithms = pytest.mark.parametrize("algorithm", ["appo", "ppo"])

#: For the environments in toys.py.
TOYS: dict[str, dict[str, Any]] = {
    "appo": {"envs_per_runner": 32, "fragment_steps": 20, "batch_size": 640, "grad_clip": 0.5},
    "ppo": {"envs_per_runner": 32, "fragment_steps": 40, "batch_size": 1280},
}


def train(place: Place, *options: object) -> dict[str, Any]:
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests"}
    run = place.run("train", *options, "--run-dir", "run", **path)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
    return summary(place.path / "run")


@pytest.mark.long
@algorithms
@pytest.mark.parametrize("seed", range(3))
def test_acrobot_is_solved(place: Place, algorithm: str, seed: int) -> None:
    limits = ("--stop-return", -100, "--stop-steps", 1_000_000)
    end = train(place, "acrobot", "--algorithm", algorithm, "--seed", seed, *limits)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.long  # mountaincar-continuous, which ships, has them, too
@seeds
def test_continuous_actions_are_learned_by_ppo(place: Place, seed: int) -> None:
    limits = ("--stop-return", -300, "--stop-steps", 1_500_000)
    end = train(place, "pendulum", "--algorithm", "ppo", "--seed", seed, *limits)
    assert end["solved"], metrics(place.path / "run")


@seeds
def test_ppo_learns_synchronously_too(place: Place, seed: int) -> None:
    options = ("--algorithm", "ppo", "--synchronous", "--stop-steps", 1_000_000)
    end = train(place, "cartpole", *options, "--seed", seed)
    assert end["solved"], metrics(place.path / "run")
    assert end["staleness_max"] == 0


@pytest.mark.parametrize("algorithm", ["appo", left_to_long("ppo"), "pqn"])
@pytest.mark.parametrize("seed", first_of([1, 2]))
@pytest.mark.long
def test_cartpole_is_solved(place: Place, algorithm: str, seed: int) -> None:
    limits = ("--stop-return", 475, "--stop-steps", 500_000)
    end = train(place, "cartpole", "--algorithm", algorithm, "--seed", seed, *limits)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.parametrize("seed", first_of([1, 2]))
def test_dqn_holds_poles_ten_times_as_long_as_random_play(place: Place, seed: int) -> None:
    limits = ("--stop-return", 220, "--stop-steps", 60_000)
    end = train(place, "cartpole", "--algorithm", "dqn", "--seed", seed, *limits)
    assert end["solved"], metrics(place.path / "run")


def test_two_runners_and_a_learner_hold_the_ratio_that_they_are_told(place: Place) -> None:
    """The shape of Ape-X: priorities, environments that explore less and less, and a learner that
    draws each step eight times, whoever is faster."""
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


ATOMS = {"atoms": 51, "v_min": 0.0, "v_max": 20.0}
DUELING = {"dueling": True}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("network", [ATOMS, DUELING, {**ATOMS, **DUELING}], ids=str)
def test_each_kind_of_dqn_holds_poles_ten_times_as_long_as_random_play(
    place: Place, network: dict[str, Any], seed: int
) -> None:
    model = json.dumps({"hidden_sizes": [64, 64], "activation": "relu", **network})
    limits = ("--stop-return", 220, "--stop-steps", 60_000)
    options = ("--algorithm", "dqn", "--seed", seed, "--model", model)
    end = train(place, "cartpole", *options, *limits)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [*first_of([("sac", 1), ("sac", 2)]), *first_of([("td3", 1), ("td3", 2)])],
)
@pytest.mark.long
def test_a_mass_is_pushed_to_its_place(place: Place, algorithm: str, seed: int) -> None:
    model = json.dumps({"hidden_sizes": [32, 32], "activation": "relu"})
    replay = ("--replay-batch-size", 64, "--replay-ratio", 64, "--replay-begin", 300)
    options = ("--env", "support.toys:Push", "--algorithm", algorithm, "--seed", seed, *replay)
    limits = ("--stop-return", -4, "--stop-steps", 8000)
    end = train(place, *options, "--lr", 1e-3, "--model", model, *limits)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.long
@pytest.mark.parametrize("task", ["pendulum", "cartpole"])
def test_sac_solves(place: Place, task: str) -> None:
    end = train(place, task, "--algorithm", "sac", "--seed", 1, "--stop-steps", 150_000)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.long
@seeds
def test_td3_solves_pendulum(place: Place, seed: int) -> None:
    limits = ("--stop-return", -200, "--stop-steps", 60_000)
    end = train(place, "pendulum", "--algorithm", "td3", "--seed", seed, *limits)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.long
@seeds
def test_dqn_solves_cartpole(place: Place, seed: int) -> None:
    limits = ("--stop-return", 475, "--stop-steps", 150_000)
    end = train(place, "cartpole", "--algorithm", "dqn", "--seed", seed, *limits)
    assert end["solved"], metrics(place.path / "run")


@pytest.mark.long
@algorithms
def test_solved_stays_solved(place: Place, algorithm: str) -> None:
    """475, and then another million steps in which what greedy play brings stays at 400.

    `benchmarks/sample-efficiency.md` has five seeds of each.
    """
    limits = ("--stop-return", 501, "--stop-steps", 1_500_000)
    evaluations = ("--evaluation-seconds", 1, "--evaluation-episodes", 20)
    train(place, "cartpole", "--algorithm", algorithm, "--seed", 0, *limits, *evaluations)
    lines = metrics(place.path / "run")
    steps = [line["env_steps_trained"] for line in lines]
    solved = next(
        step
        for step, line in zip(steps, lines, strict=True)
        if (line["episode_return_mean"] or 0.0) >= 475
    )
    assert solved <= 500_000
    # A line has the newest evaluation, which may be of a policy of some time ago.
    returns = [
        line["evaluation_return_mean"]
        for step, line in zip(steps, lines, strict=True)
        if step > solved + 200_000
    ]
    assert len(returns) > 3
    assert min(returns) >= 400, returns


#: Environment, threshold and keys.
TASKS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "masks": ("NextFree", 17.0, {"env_kwargs": {"mask_in": "info"}, "gamma": 0.5}),
    "dict": ("Errand", 0.6, {"gamma": 0.9, "entropy_coefficient": 0.03}),
    "several choices": ("Dials", 17.0, {"gamma": 0.5}),
    "memory": ("TMaze", 0.85, {"env_kwargs": {"length": 4}, "model": {"recurrent": "lstm"}}),
}


@pytest.mark.long
@algorithms
@pytest.mark.parametrize("task", TASKS)
def test_masks_maps_choices_and_memories_are_learned_with(
    place: Place, task: str, algorithm: str
) -> None:
    env, threshold, keys = TASKS[task]
    settings = {
        "env": f"support.toys:{env}",
        "algorithm": algorithm,
        "num_env_runners": 1,
        "lr": 2e-3,
        "stop_return": threshold,
        "stop_steps": 1_500_000,
        **TOYS[algorithm],
        **keys,
    }
    if (env, algorithm) == ("Errand", "appo"):
        # With each step used four times, a rate of 2e-3 gets stuck in about every second run.
        settings["lr"] = 5e-4
    options: list[object] = []
    for key, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        options += [f"--{key.replace('_', '-')}", text]
    end = train(place, *options)
    assert end["solved"], [line["episode_return_mean"] for line in metrics(place.path / "run")]
