"""Each algorithm learns, and each shipped configuration.

Seed by seed, against thresholds. IMPALA on CartPole is in `test_learning.py`, and what it learns
from spaces of every kind in `test_learning_spaces.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.place import Place, assert_books_balance, checkpoints, metrics, seeds, summary

from juggler.driver.config_files import read_shipped
from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.runtime.checkpoints.checkpoint import read

pytestmark = pytest.mark.slow


def _dqn(**network: Any) -> tuple[object, ...]:
    model = {"hidden_sizes": [64, 64], "activation": "relu", **network}
    return ("cartpole", "--algorithm", "dqn", "--model", json.dumps(model))


ATOMS: dict[str, Any] = {"atoms": 51, "v_min": 0.0, "v_max": 20.0}

#: Arguments of `juggler train`, the return to be reached, and the steps that it may take.
LEARNS: dict[str, tuple[tuple[object, ...], float, int]] = {
    "ppo synchronously": (("cartpole", "--algorithm", "ppo", "--synchronous"), 475, 1_000_000),
    "dqn at first": (("cartpole", "--algorithm", "dqn"), 220, 60_000),  # random play: 22
    "dqn": (("cartpole", "--algorithm", "dqn"), 475, 150_000),
    "dqn with atoms": (_dqn(**ATOMS), 220, 60_000),
    "dqn dueling": (_dqn(dueling=True), 220, 60_000),
    "dqn with dueling atoms": (_dqn(dueling=True, **ATOMS), 220, 60_000),
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
