"""Numbers of infos over episodes, whichever way environments reset and fragments cut."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.envrunner.environments.vector import EnvironmentsInTurn
from juggler.envrunner.info_numbers import (
    MOST_NAMES,
    InfoNumber,
    InfoWatch,
    from_messages,
    to_messages,
)
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.modules.building import build_module

LENGTHS = (3, 1, 5, 2)


class Told(gymnasium.Env[Any, Any]):
    """Episodes of known lengths, whose infos have the number of the step, and a success at some
    ends."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, offset: int, integers: bool = False) -> None:
        self._offset, self._episode, self._integers = offset, -1, integers

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._step = self._episode + 1, 0
        return np.zeros(1, np.float32), {"step": 1000.0, "success": 7.0, "name": "a reset"}

    def step(self, action: Any) -> Any:
        self._step += 1
        length = LENGTHS[(self._episode + self._offset) % len(LENGTHS)]
        over = self._step == length
        infos: dict[str, Any] = {"step": float(self._step), "name": "text", "far": [1.0, 2.0]}
        infos |= {"broken": float("nan"), "huge": -1e308}
        if self._integers:
            infos |= {"endless": 10**400, 7: 1.0}
        if over and length > 1:
            infos["success"] = length == 5
        cut = over and length == 2
        return np.zeros(1, np.float32), 1.0, over and not cut, cut, infos


def expected(lengths: list[int]) -> tuple[list[InfoNumber], list[InfoNumber]]:
    steps = [InfoNumber((1 + length) / 2, 1.0, float(length)) for length in lengths]
    return steps, [InfoNumber(*[float(length == 5)] * 3) for length in lengths if length > 1]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("fragment", [1, 4, 50])
@pytest.mark.parametrize("ours", [True, False])
def test_each_episode_tells_its_mean_its_least_and_its_most(
    mode: AutoresetMode, fragment: int, ours: bool
) -> None:
    functions = [lambda k=k: Told(k, ours) for k in range(2)]
    env = (
        EnvironmentsInTurn(functions, mode, "Told")
        if ours
        else SyncVectorEnv(functions, autoreset_mode=mode)
    )
    spaces = env.single_observation_space, env.single_action_space
    module = build_module(None, *spaces, {})
    sampler = Sampler(env, Actor(module, 2, fragment, 0), fragment, seed=0)
    steps, successes, lengths = [], [], []
    for _ in range(100 // fragment):
        sampled = sampler.sample((1, 0))
        lengths += sampled.episode_lengths
        steps += sampled.infos.get("step", [])
        successes += sampled.infos.get("success", [])
        assert sampled.infos.keys() <= {"step", "success"}
    assert len(lengths) > 40
    assert set(lengths) == {*LENGTHS}
    assert (steps, successes) == expected(lengths)


def test_a_new_start_drops_what_episodes_that_were_running_gave() -> None:
    watch = InfoWatch(1, 2, AutoresetMode.NEXT_STEP)
    live, done = np.ones((1, 2), np.bool_), np.zeros((1, 2), np.bool_)
    for _ in range(2):
        for t, value in enumerate((9.0, 1.0)):
            watch.see({"x": np.array([value])}, t, done[:, t])
        assert watch.advance(live, done) == {}
        watch.restart()
    watch.see({"x": np.array([2.0])}, 1, done[:, 1])
    done[0, 1] = True
    found = watch.advance(live, done)
    assert found == {"x": [InfoNumber(2.0, 2.0, 2.0)]}
    assert from_messages(to_messages(found)) == found


def test_of_many_numbers_the_first_are_told() -> None:
    watch = InfoWatch(1, 1, AutoresetMode.NEXT_STEP)
    one = np.ones((1, 1), np.bool_)
    infos = {f"x{k:03d}": np.ones(1) for k in range(MOST_NAMES + 9)}
    watch.see({"bad\n": np.ones(1), "n" * 101: np.ones(1), **infos}, 0, one[:, 0])
    found = watch.advance(one, one)
    assert list(found) == list(infos)[:MOST_NAMES]


@pytest.mark.parametrize(
    "other", [np.array(["n/a"], object), {"y": 1.0}, np.ones((1, 2)), "n/a", None]
)
def test_a_number_that_is_something_else_for_a_step_is_left_out_there(other: Any) -> None:
    watch = InfoWatch(1, 2, AutoresetMode.NEXT_STEP)
    live = np.ones((1, 2), np.bool_)
    done = np.array([[False, True]])
    watch.see({"x": np.array([3.0])}, 0, done[:, 0])
    watch.see({"x": other}, 1, done[:, 1])
    found = watch.advance(live, done)
    assert found == {"x": [InfoNumber(3.0, 3.0, 3.0)]}


@pytest.mark.parametrize("flags", [np.array([0.0]), np.ones((1, 2), np.bool_), "n/a", None])
def test_what_does_not_flag_the_environments_of_a_number_is_passed_over(flags: Any) -> None:
    watch = InfoWatch(1, 1, AutoresetMode.SAME_STEP)
    done = np.zeros((1, 1), np.bool_)
    watch.see({"x": np.array([3.0]), "_x": flags}, 0, done[:, 0])
    assert watch.advance(None, ~done) == {"x": [InfoNumber(3.0, 3.0, 3.0)]}
