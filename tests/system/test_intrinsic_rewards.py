"""Runs with a reward for what is new."""

from __future__ import annotations

import json

import pytest
from support.place import REPOSITORY, Place, metrics, summary

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
