"""A run is solved when what it keeps plays as well as was asked, and not in a lucky moment."""

from __future__ import annotations

import pytest
from support.place import Command, Place, assert_books_balance, summary

#: An episode of one step, worth a number from 1 to 6: 3.5 on the average, whatever one does.
TOYS = """
import gymnasium, numpy as np


class Dice(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        value = float(self.np_random.integers(1, 7))
        return np.zeros(1, np.float32), value, True, False, {}

"""

FEW = ("--num-env-runners", 1, "--envs-per-runner", 16, "--batch-size", 256, "--progress", "plain")


def start(place: Place, goal: float, *options: object, run: str = "run") -> Command:
    place.write("toys_of_chance.py", TOYS)
    named = ("--env", "toys_of_chance:Dice", "--stop-return", goal, "--run-dir", run)
    return place.start("train", *named, *FEW, *options)


def state(place: Place, run: str) -> bytes:
    newest = place.path / summary(place.path / run)["checkpoint"]
    return (newest / "state.safetensors").read_bytes()


@pytest.mark.slow
def test_a_lucky_window_does_not_solve_and_leaves_no_trace(place: Place) -> None:
    """The same numbers in all three runs: the dice fall as they fall, and a window gets to 3.8."""
    options = ("--synchronous", "--stop-steps", 60_000)
    believed = start(place, 3.8, *options, "--no-confirm", run="believed")
    assert believed.wait(110) == 0, believed.output
    assert summary(place.path / "believed")["solved"]
    assert ", not confirmed: confirm = false" in believed.output
    run = start(place, 3.8, *options)
    assert run.wait(110) == 0, run.output
    end = summary(place.path / "run")
    assert not end["solved"], run.output
    assert (end["reason_for_stop"], end["confirmation"]) == ("stop_steps", None)
    assert "not confirmed: update " in run.output
    assert_books_balance(place.path / "run")
    aimless = start(place, 6.5, *options, run="aimless")
    assert aimless.wait(110) == 0, aimless.output
    assert state(place, "run") == state(place, "aimless"), "candidates change nothing"
    assert not (place.path / "run/candidate").exists()
    place.assert_nothing_is_left()
