from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.processes import end_forkserver
from support.scripted_environments import Failing, Script, Scripted

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.environment_processes import EnvironmentProcesses
from juggler.envrunner.environments.environments_in_turn import EnvironmentsInTurn
from juggler.envrunner.failures import EnvironmentFailed


def processes_of(
    *functions: Callable[[], gymnasium.Env[Any, Any]], deadline: float = 30.0
) -> EnvironmentProcesses:
    return EnvironmentProcesses(functions, deadline, "toy")


def assert_ended(env: EnvironmentProcesses) -> None:
    assert env.closed
    assert all(process.exitcode is not None for process in env.processes)


def test_nothing_is_left_after_close() -> None:
    env = processes_of(Scripted, Scripted)
    env.reset(seed=[1, 2])
    env.close()
    assert_ended(env)
    assert [process.exitcode for process in env.processes] == [0, 0]


@pytest.mark.slow
def test_a_vector_that_is_dropped_without_close_leaves_no_process() -> None:
    env = processes_of(Scripted, functools.partial(Failing, "step", "hang"))
    env.reset(seed=[1, 2])
    processes = env.processes
    env._pipes[1].send_bytes(b"")  # the request of a step
    del env
    gc.collect()
    assert all(process.exitcode is not None for process in processes)
    assert processes[1].exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_ends_quietly_without_its_owner() -> None:
    env = processes_of(Scripted)
    env.reset(seed=[1])
    env._pipes[0].close()
    env.processes[0].join(30)
    assert env.processes[0].exitcode == 0
    env.close()


@pytest.mark.long
def test_environments_run_in_processes_of_a_forkserver_without_torch() -> None:
    from juggler.envrunner.environments.vector import (
        make_vector_env,  # has torch: not for Reporting
    )

    end_forkserver()  # that of a test before this one may have torch
    config = EnvRunnerConfig(env="given", envs_per_runner=1, vectorize="async")
    env = make_vector_env(config, Reporting)
    env.reset(seed=[1])
    infos = env.step(np.zeros(1, int))[-1]
    env.close()
    end_forkserver()  # one of tests behind this one has to have torch
    assert infos["parent"].tolist() != [os.getpid()]
    assert infos["has torch"].tolist() == [False]


class Reporting(Scripted):
    def step(self, action: Any) -> Any:
        about = {"parent": os.getppid(), "has torch": "torch" in sys.modules}
        return *super().step(action)[:4], about


def test_a_constructor_that_fails_only_in_its_process_keeps_its_traceback() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(EnvironmentFailed, match="environment 1 ") as caught:
        processes_of(Scripted, fails_elsewhere)
    assert "in fails_elsewhere" in caught.value.traceback
    assert "no licence for a second simulator" in caught.value.reason
    assert set(multiprocessing.active_children()) == before


def fails_elsewhere() -> Scripted:
    raise RuntimeError("no licence for a second simulator")


def test_an_error_that_cannot_be_pickled_is_reported_by_what_makes_environments_safe() -> None:
    from juggler.envrunner.environments.vector import make_vector_env

    kwargs = {"call": "step", "how": "raise what cannot be pickled"}
    config = EnvRunnerConfig(env_kwargs=kwargs, envs_per_runner=1, vectorize="async")
    env = make_vector_env(config, Failing)
    env.reset(seed=[1])
    with pytest.raises(EnvironmentFailed, match="the cube fell off the table"):
        env.step(np.zeros(1, int))
    env.close()


def reset_and_step(env: EnvironmentProcesses) -> None:
    env.reset(seed=[1, 2])
    env.step(np.zeros(2, int))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["step", pytest.param("reset", marks=pytest.mark.long)])
def test_a_process_that_dies_is_named_with_its_exit_code(call) -> None:
    env = processes_of(Scripted, functools.partial(Failing, call, "die"))
    with pytest.raises(EnvironmentFailed, match=r"environment 1 \(toy\).*exit code -9") as caught:
        reset_and_step(env)
    assert caught.value.call == call
    env.close()
    assert_ended(env)


@pytest.mark.long
@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_environment_that_hangs_is_named_and_killed(call) -> None:
    env = processes_of(Scripted, functools.partial(Failing, call, "hang"), deadline=2.5)
    with pytest.raises(EnvironmentFailed, match=r"environment 1 \(toy\).*within 2.5 s") as caught:
        reset_and_step(env)
    assert caught.value.call == call
    env.close(timeout=0.1)
    assert_ended(env)
    assert env.processes[1].exitcode == -signal.SIGKILL


def test_a_vector_can_be_closed_with_gymnasiums_options() -> None:
    env = processes_of(Scripted)
    try:
        env.close(timeout=None, terminate=True)
    finally:
        env.close()
    assert_ended(env)


class Pixels(Scripted):
    """Shows pixels [2, 3] first, and given ones after a step."""

    def __init__(
        self, shown: Any, info: Any = None, reward: Any = 0.0, script: Script = ()
    ) -> None:
        super().__init__(script)
        self.observation_space = gymnasium.spaces.Box(0, 255, (2, 3), np.uint8)
        self.shown, self.info = shown, {} if info is None else info
        self.reward = reward

    def observation(self):
        return np.asarray(self.shown) if self.steps else np.zeros((2, 3), np.uint8)

    def step(self, action):
        observation, _, *ends, _ = super().step(action)
        return (observation, self.reward, *ends, self.info)


def step_in_a_process(ends: bool = False, **returned: Any) -> Any:
    returned["script"] = ((1 if ends else 3, "terminated"),)
    env = EnvironmentProcesses([functools.partial(Pixels, **returned)], 30.0, "pixels")
    try:
        env.reset(seed=[1])
        return env.step(np.zeros(1, int))[0].tolist()
    finally:
        env.close()


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (np.full((2, 3), 0.7), r"float64 of shape \[2, 3\]"),
        (np.full((2, 3), 300), r"int64 of shape \[2, 3\]"),
        (np.zeros((3, 2), np.uint8), r"uint8 of shape \[3, 2\]"),
        (np.zeros(6, np.uint8), r"uint8 of shape \[6\]"),
        (np.zeros(1, np.uint8), r"uint8 of shape \[1\]"),
    ],
)
def test_an_observation_is_not_squeezed_into_the_shape_and_dtype_of_its_space(shown, words) -> None:
    expected = rf"0 \(pixels\) failed in step: its observation is {words}, but its obs.* says Box"
    with pytest.raises(EnvironmentFailed, match=expected):
        step_in_a_process(shown=shown)


def test_the_last_observation_of_a_truncated_episode_must_fit_its_space() -> None:
    script = ((1, "truncated"),)
    make = functools.partial(Pixels, np.full((2, 3), 0.7), script=script)
    env = processes_of(make)
    env.reset(seed=[1])
    expected = r"environment 0 \(toy\) failed in step: at the end of .* is float64"
    with pytest.raises(EnvironmentFailed, match=expected):
        env.step(np.zeros(1, int))
    env.close()


def test_the_last_observation_of_an_episode_that_terminates_is_not_checked() -> None:
    shown = np.full((2, 3), 0.7)
    assert step_in_a_process(ends=True, shown=shown) == np.zeros((1, 2, 3)).tolist()


# Steps of environments in processes of their own, beside those of environments in turn.


CHOICES = {
    "discrete": spaces.Discrete(3, start=2),
    "continuous": spaces.Box(-1, 1, (2,), np.float32),
    "several": spaces.MultiDiscrete([2, 3]),
    "structure": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,))}),
}


class Telling(gymnasium.Env[Any, Any]):
    """Sums over its last choice as rewards, and large infos."""

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
    """Ends with a wrong reward, a wrong info, or an error."""

    fails: SimpleQueue[threading.Thread] = SimpleQueue()

    def __init__(self, what: str) -> None:
        super().__init__(length=2)
        self.what = what

    def step(self, action: Any) -> Any:
        observation, reward, ended, cut, info = super().step(action)
        if not ended:
            return observation, reward, ended, cut, info
        self.fails.put(threading.current_thread())
        if self.what == "error":
            raise RuntimeError("my environment is broken")
        if self.what == "reward":
            return observation, "much", ended, cut, info
        return observation, reward, ended, cut, ["nothing"]


class Slow(Telling):
    """Takes longer in its second step than `Wrong` and its exit."""

    def step(self, action: Any) -> Any:
        if self.t == 1:
            Wrong.fails.get(timeout=60).join(60)
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


@pytest.mark.parametrize("choices", CHOICES)
def test_they_give_what_environments_in_turn_give(choices: str) -> None:
    functions = [lambda length=length: Telling(choices, length) for length in (2, 3)]
    aside, here = (
        EnvironmentProcesses(functions, 30, "toy"),
        EnvironmentsInTurn(functions, "toy"),
    )
    assert same(aside.reset(seed=[1, 2])[0], here.reset(seed=[1, 2])[0])
    here.action_space.seed(0)
    for _ in range(7):
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
    env = EnvironmentProcesses([Slow, lambda: Wrong(what)], 30, "toy")
    env.reset(seed=[1, 2])
    env.step(np.array([2, 3]))
    with pytest.raises(EnvironmentFailed, match=rf"environment 1 \(toy\) failed in step: .*{why}"):
        env.step(np.array([2, 3]))
    env.close()


def test_actions_of_another_shape_or_kind_are_errors() -> None:
    env = EnvironmentProcesses([Telling, Telling], 30, "toy")
    env.reset(seed=[1, 2])
    with pytest.raises(ValueError, match=r"actions of shape \(1,\), but"):
        env.step(np.array([2]))
    with pytest.raises(TypeError, match="Cannot cast"):
        env.step(np.array([2.7, 3.9]))
    assert env.step(np.array([2, 3]))[1].tolist() == [2, 3]
    env.close()


def test_no_call_takes_the_answers_to_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    env = processes_of(Telling, Telling)
    env.reset(seed=[1, 2])

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env, "_wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.step(np.array([2, 3]))
    for call in (lambda: env.step(np.array([2, 3])), env.reset):
        with pytest.raises(RuntimeError, match="half-way"):
            call()
    env.close()
    assert_ended(env)


class Masking(Telling):
    """Truncates its episode, with a last mask of this size."""

    def __init__(self, numbers: int) -> None:
        super().__init__(length=1)
        self.numbers = numbers

    def step(self, action: Any) -> Any:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, True, {"action_mask": np.ones(self.numbers, np.int8)}


def test_last_masks_of_different_sizes_are_told_with_the_environment() -> None:
    functions = [lambda: Masking(3), lambda: Masking(2)]
    said = r"environment 1 \(toy\) failed in step: the action mask in its info is not like .* 2 num"
    for env in (processes_of(*functions), EnvironmentsInTurn(functions, "toy")):
        env.reset(seed=[1, 2])
        with pytest.raises(EnvironmentFailed, match=said):
            env.step(np.array([2, 3]))
        env.close()


def test_an_environment_with_other_spaces_than_the_first_is_told() -> None:
    functions = [Telling, lambda: Telling("continuous")]
    said = r"environment 1 \(toy\) failed in constructor: its spaces are .* environment 0"
    with pytest.raises(EnvironmentFailed, match=said):
        EnvironmentProcesses(functions, 30, "toy")
