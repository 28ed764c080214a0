"""Steps of environments in processes of their own, beside those of environments in turn."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from juggler.envrunner.environments.environment_processes import EnvironmentProcesses
from juggler.envrunner.environments.vector import EnvironmentsInTurn
from juggler.envrunner.failures import EnvironmentFailed

CHOICES = {
    "discrete": spaces.Discrete(3, start=2),
    "continuous": spaces.Box(-1, 1, (2,), np.float32),
    "several": spaces.MultiDiscrete([2, 3]),
    "structure": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,))}),
}
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class Telling(gymnasium.Env[Any, Any]):
    """Its rewards are sums over its last choice, kept by reference, and its infos tell much."""

    observation_space = spaces.Box(-99, 99, (2,), np.float64)

    def __init__(self, choices: str = "discrete", length: int = 3) -> None:
        self.action_space = CHOICES[choices]
        self.length, self.t, self.last = length, 0, np.zeros(())

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**options)
        self.t = 0
        return np.array([0.0, self.np_random.random()]), {"action_mask": np.ones(3, np.int8)}

    def step(self, action: Any) -> Any:
        before, self.last, self.t = self.last, action, self.t + 1
        info = {"t": self.t, "big": np.zeros(9), "text": "x", "action_mask": np.ones(3, np.int8)}
        if self.t == 2:
            info["at two"] = 0.5
        ended, cut = self.t == self.length, self.t == self.length + 1
        return np.array([self.t, of(before)]), of(action), ended, cut, info


class Wrong(Telling):
    """The last step of its episode gives something else as its reward or its info, or raises."""

    def __init__(self, what: str) -> None:
        super().__init__(length=2)
        self.what = what

    def step(self, action: Any) -> Any:
        observation, reward, ended, cut, info = super().step(action)
        if not ended:
            return observation, reward, ended, cut, info
        if self.what == "error":
            raise RuntimeError("my environment is broken")
        if self.what == "reward":
            return observation, "much", ended, cut, info
        return observation, reward, ended, cut, ["nothing"]


class Slow(Telling):
    """Its second step takes longer than those of others and the ends of their processes."""

    def step(self, action: Any) -> Any:
        time.sleep(0.5 * (self.t == 1))
        return super().step(action)


def of(action: Any) -> float:
    parts = action.values() if isinstance(action, dict) else [action]
    return float(sum(np.sum(part) for part in parts))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) and one.dtype == object:
        return all(same(*each) for each in zip(one, other, strict=True))
    if one is None:
        return other is None
    return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


@pytest.mark.parametrize(
    ("choices", "mode"),
    [("discrete", mode) for mode in MODES] + [(choices, MODES[1]) for choices in list(CHOICES)[1:]],
)
def test_they_give_what_environments_in_turn_give(choices: str, mode: AutoresetMode) -> None:
    functions = [lambda length=length: Telling(choices, length) for length in (2, 3)]
    aside, here = (
        EnvironmentProcesses(functions, mode, 30, "toy"),
        EnvironmentsInTurn(functions, mode, "toy"),
    )
    assert same(aside.reset(seed=[1, 2])[0], here.reset(seed=[1, 2])[0])
    here.action_space.seed(0)
    for _ in range(2 if mode is AutoresetMode.DISABLED else 7):
        actions = here.action_space.sample()
        for each, of_turn in zip(aside.step(actions), here.step(actions), strict=True):
            assert same(each, of_turn)
    aside.close()


@pytest.mark.parametrize(
    ("what", "why"),
    [("reward", "float"), ("info", "its info is of type list"), ("error", "my environment is")],
)
def test_a_wrong_step_is_told_with_the_environment_also_while_another_one_takes_its_time(
    what: str, why: str
) -> None:
    env = EnvironmentProcesses([Slow, lambda: Wrong(what)], AutoresetMode.SAME_STEP, 30, "toy")
    env.reset(seed=[1, 2])
    env.step(np.array([2, 3]))
    with pytest.raises(EnvironmentFailed, match=rf"environment 1 \(toy\) failed in step: .*{why}"):
        env.step(np.array([2, 3]))
    env.close()


def test_actions_of_another_shape_or_kind_and_steps_out_of_turn_are_errors() -> None:
    env = EnvironmentProcesses([Telling, Telling], MODES[0], 30, "toy")
    env.reset(seed=[1, 2])
    with pytest.raises(ValueError, match=r"actions of shape \(1,\), where \(2,\) is due"):
        env.step(np.array([2]))
    with pytest.raises(TypeError, match="Cannot cast"):
        env.step(np.array([2.7, 3.9]))
    with pytest.raises(NoAsyncCallError):
        env.step_wait()
    env.step_async(np.array([2, 3]))
    with pytest.raises(AlreadyPendingCallError):
        env.step_async(np.array([2, 3]))
    assert env.step_wait()[1].tolist() == [2, 3]
    env.close()
