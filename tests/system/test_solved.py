"""A run is solved when what it keeps plays as well as was asked, and not in a lucky moment."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.place import Command, Place, assert_books_balance, eventually, metrics, summary

from juggler.driver.record.wording import number

#: Dice shows a number from 1 to 6, whatever one does: 3.5 on the average. Sure is worth 1. Both are
#: one step long. In an evaluator, Sure does what the file `evaluator.txt` says.
TOYS = """
import pathlib, time

import gymnasium, numpy as np


class Dice(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.value(), True, False, {}

    def value(self):
        return float(self.np_random.integers(1, 7))


class Sure(Dice):
    def value(self):
        if "evaluator" in pathlib.Path("/proc/self/cmdline").read_text():
            for word in pathlib.Path("evaluator.txt").read_text().split():
                pathlib.Path("plays.txt").touch()
                time.sleep(float(word))
        return 1.0
"""

FEW = ("--num-env-runners", 1, "--envs-per-runner", 16, "--batch-size", 256, "--progress", "plain")


def start(place: Place, env: str, goal: float, *options: object, run: str = "run") -> Command:
    place.write("toys_of_chance.py", TOYS)
    named = ("--env", f"toys_of_chance:{env}", "--stop-return", goal, "--run-dir", run)
    return place.start("train", *named, *FEW, *options)


def state(place: Place, run: str) -> bytes:
    newest = place.path / summary(place.path / run)["checkpoint"]
    return (newest / "state.safetensors").read_bytes()


@pytest.mark.slow
def test_a_lucky_window_does_not_solve_and_leaves_no_trace(place: Place) -> None:
    """The same numbers in all three runs: the dice fall as they fall, and a window gets to 3.8."""
    options = ("--synchronous", "--stop-steps", 60_000)
    believed = start(place, "Dice", 3.8, *options, "--no-confirm", run="believed")
    assert believed.wait(110) == 0, believed.output
    assert summary(place.path / "believed")["solved"]
    assert ", not confirmed: confirm = false" in believed.output
    run = start(place, "Dice", 3.8, *options)
    assert run.wait(110) == 0, run.output
    end = summary(place.path / "run")
    assert not end["solved"], run.output
    assert (end["reason_for_stop"], end["confirmation"]) == ("stop_steps", None)
    assert "not confirmed: update " in run.output
    assert_books_balance(place.path / "run")
    aimless = start(place, "Dice", 6.5, *options, run="aimless")
    assert aimless.wait(110) == 0, aimless.output
    assert state(place, "run") == state(place, "aimless"), "candidates change nothing"
    assert not (place.path / "run/candidate").exists()
    place.assert_nothing_is_left()


@pytest.mark.long
def test_what_was_confirmed_is_what_is_kept_played_and_gone_on_with(place: Place) -> None:
    options = ("--stop-return", 60, "--run-dir", "run", "--num-env-runners", 1)
    run = place.run("train", "cartpole", *options)
    assert run.status == 0, run.output
    end = summary(place.path / "run")
    confirmation = end["confirmation"]
    assert end["solved"]
    assert confirmation["confirmed"]
    assert (confirmation["episodes"], confirmation["return_mean"] >= 60) == (100, True)
    kept = place.path / end["checkpoint"]
    assert int(kept.name) == confirmation["update"]
    assert kept.name == max(path.name for path in (place.path / "run/checkpoints").iterdir())
    record = json.loads((kept / "checkpoint.json").read_text())
    assert record["counters"]["trained"] == confirmation["env_steps_trained"]
    said = f", confirmed by 100 episodes: {number(confirmation['return_mean'])} ± "
    assert said in run.output
    played = place.run("evaluate", "run", "--episodes", 1)
    assert f"run/checkpoints/{kept.name}" in played.output
    lines = len(metrics(place.path / "run"))
    more = ("--stop-return", 501, "--stop-steps", end["env_steps_trained"] + 50_000)
    again = place.run("train", "--resume", "run", *more)
    assert again.status == 0, again.output
    assert f"going on from update {confirmation['update']}" in again.output
    first = metrics(place.path / "run")[lines]
    assert first["env_steps_trained"] >= confirmation["env_steps_trained"]
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.long
def test_the_verdict_of_a_synchronous_run_is_the_same_every_time(place: Place) -> None:
    ends: list[dict[str, Any]] = []
    for name in ("one", "two"):
        options = ("--env", "CartPole-v1", "--stop-return", 30, "--synchronous", "--run-dir", name)
        run = place.run("train", *options, *FEW)
        assert run.status == 0, run.output
        ends.append(summary(place.path / name))
    assert ends[0]["solved"]
    assert ends[0]["confirmation"] == ends[1]["confirmation"]
    assert ends[0]["updates"] == ends[1]["updates"] == ends[0]["confirmation"]["update"]
    assert state(place, "one") == state(place, "two")


@pytest.mark.long
@pytest.mark.parametrize("options", [("--stop-steps", 1000), ("--stop-steps", 1, "--synchronous")])
def test_steps_that_are_used_up_wait_for_the_verdict(place: Place, options: tuple[object]) -> None:
    """Even if the first update used them up, before there was an evaluator."""
    place.write("evaluator.txt", "0.02 " * 2)
    run = start(place, "Sure", 1.0, *options)
    assert run.wait(110) == 0, run.output
    end = summary(place.path / "run")
    assert end["solved"], run.output
    assert end["reason_for_stop"] == "solved"
    assert end["wall_seconds_to_solved"] > 0
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.long
def test_an_interrupt_does_not_wait_for_the_verdict(place: Place) -> None:
    place.write("evaluator.txt", "0.1 " * 10_000)
    run = start(place, "Sure", 1.0)
    eventually((place.path / "plays.txt").exists, 90, lambda: run.output)
    run.interrupt()
    assert run.wait(60) == 130, run.output
    end = summary(place.path / "run")
    assert (end["reason_for_stop"], end["solved"], end["confirmation"]) == (
        "interrupted",
        False,
        None,
    )
    assert int(Path(end["checkpoint"]).name) == end["updates"]
    assert not (place.path / "run/candidate").exists()
    place.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_evaluator_that_is_killed_is_followed_by_one_that_confirms(
    place: Place, synchronous: bool
) -> None:
    place.write("evaluator.txt", "0.1 " * 10_000)
    run = start(place, "Sure", 1.0, *(["--synchronous"] if synchronous else []))
    eventually((place.path / "plays.txt").exists, 90, lambda: run.output)
    place.write("evaluator.txt", "0")
    place.worker("evaluator 0").send_signal(signal.SIGKILL)
    assert run.wait(90) == 0, run.output
    assert summary(place.path / "run")["confirmation"]["confirmed"], run.output
    assert "evaluator-0 (pid" in run.output
    place.assert_nothing_is_left()


@pytest.mark.long
def test_an_evaluator_that_always_dies_leaves_what_training_says(place: Place) -> None:
    place.write("evaluator.txt", "never")
    run = start(place, "Sure", 1.0)
    assert run.wait(110) == 0, run.output
    confirmation = summary(place.path / "run")["confirmation"]
    assert confirmation == {"confirmed": False, "why_not": "evaluator-0 keeps ending"}
    assert "could not convert string to float: 'never'" in run.output
    assert ", not confirmed: evaluator-0 keeps ending" in run.output
    place.assert_nothing_is_left()
