"""EnvironmentsInTurn gives what Gymnasium's SyncVectorEnv gives."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from support.scripted_environments import AsTrees, Failing, Masked, Scripted

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.environments_in_turn import (
    EnvironmentsInTurn,
    keep_own_finals,
)
from juggler.envrunner.environments.vector import environment_in, make_vector_env
from juggler.envrunner.failures import EnvironmentFailed

SCRIPTS = [
    ((3, "terminated"), (1, "truncated"), (2, "both")),
    ((2, "truncated"),),
    ((9, "terminated"),),
]
MODES = list(AutoresetMode)


class Counted(Scripted):
    """A single number as its observation."""

    def __init__(self, script):
        super().__init__(script)
        self.observation_space = spaces.Discrete(100)

    def observation(self):
        return np.int64(self.steps)


def trees(script) -> gymnasium.Env[Any, Any]:
    return AsTrees(Scripted(script, box=True))


def masked(script) -> gymnasium.Env[Any, Any]:
    return Masked(Scripted(script), mask=lambda _: np.array([1, 1, 1], np.int8))


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif expected is None:
        assert found is None
    elif isinstance(expected, tuple) or np.asarray(expected).dtype.kind == "O":
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    else:
        np.testing.assert_array_equal(found, expected)
        assert np.asarray(found).dtype == np.asarray(expected).dtype


def leave_out_masks(infos: dict[str, Any], terminated: Any) -> None:
    """The last observations of `terminated` [N] episodes are not read."""
    infos = infos.get("final_info", infos)
    if "action_mask" in infos:
        infos["action_mask"][terminated] = 0
        infos["_action_mask"][terminated] = False
        if not infos["_action_mask"].any():
            del infos["action_mask"], infos["_action_mask"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Scripted, Counted, trees, masked])
def test_steps_and_resets_are_those_of_gymnasium(make: Any, mode: AutoresetMode) -> None:
    functions = [functools.partial(make, script) for script in SCRIPTS]
    ours = EnvironmentsInTurn(functions, mode, "scripted")
    theirs = SyncVectorEnv(functions, autoreset_mode=mode)
    keep_own_finals(theirs)
    assert ours.metadata["autoreset_mode"] is mode
    assert_same(ours.reset(seed=[3, 4, 5]), theirs.reset(seed=[3, 4, 5]))
    theirs.action_space.seed(0)
    for _ in range(20):
        actions = theirs.action_space.sample()
        found, expected = ours.step(actions), theirs.step(actions)
        leave_out_masks(expected[-1], expected[2])
        assert_same(found, expected)
        over = expected[2] | expected[3]
        if mode is AutoresetMode.DISABLED and over.any():
            again = [env.reset(options={"reset_mask": over.copy()}) for env in (ours, theirs)]
            assert_same(*again)


def test_a_seed_for_all_gives_each_its_own() -> None:
    functions = [functools.partial(Scripted, script) for script in SCRIPTS]
    ours = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "scripted")
    assert_same(ours.reset(seed=7)[0], SyncVectorEnv(functions).reset(seed=7)[0])


def test_options_reach_the_environments_that_are_reset() -> None:
    class Listening(Scripted):
        def reset(self, *, seed=None, options=None):
            self.heard = options
            return super().reset(seed=seed)

    ours = EnvironmentsInTurn([Listening] * 3, AutoresetMode.DISABLED, "listening")
    ours.reset(options={"level": 2})
    assert [env.heard for env in ours.envs] == [{"level": 2}] * 3
    ours.reset(options={"level": 3, "reset_mask": np.array([False, True, False])})
    assert [env.heard["level"] for env in ours.envs] == [2, 3, 2]
    assert "reset_mask" not in ours.envs[1].heard


def test_of_infos_that_nobody_reads_the_numbers_are_gathered() -> None:
    class Talkative(Scripted):
        def step(self, action):
            return (*super().step(action)[:4], {"speed": 3.0, "name": "x"})

    ours = EnvironmentsInTurn([Talkative] * 2, AutoresetMode.SAME_STEP, "talkative")
    ours.reset(seed=0)
    infos = ours.step(np.zeros(2, int))[-1]
    assert {name: list(each) for name, each in infos.items()} == {"speed": [3.0, 3.0]}


class Parts(Scripted):
    """Shows given observations, from a Dict space."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {"a": box, "b": gymnasium.spaces.Discrete(3)}
        )
        self.shown = shown

    def observation(self):
        return self.shown


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({"a": np.zeros(2), "b": 1, "c": 0}, ""),
        ({"a": np.zeros(3, np.float32), "b": 1}, r"at 'a' is float32 of shape \[3\]"),
        ({"a": np.zeros(2), "b": 0.5}, r"at 'b' is float64 of shape \[\]"),
        ({"a": None, "b": 1}, "at 'a' is None, but its"),
        ({"b": 1}, "has other parts than Dict.*: KeyError: 'a'"),
        (None, "is None, but its"),
    ],
)
def test_an_observation_that_is_not_of_its_space_is_named(shown: Any, words: str) -> None:
    good = {"a": np.zeros(2, np.float32), "b": 1}
    functions = [lambda: Parts(good), lambda: Parts(shown)]
    ours = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "parts")
    if not words:
        ours.reset(seed=0)
        return
    with pytest.raises(EnvironmentFailed, match=rf"1 \(parts\) failed in reset: its obs.* {words}"):
        ours.reset(seed=0)


def test_a_tuple_with_more_items_than_its_space_is_named() -> None:
    class Pair(Scripted):
        def __init__(self, items: int) -> None:
            super().__init__()
            pair = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2)))
            self.observation_space = spaces.Dict({"pair": pair})
            self.items = items

        def observation(self) -> Any:
            return {"pair": (0,) * self.items}

    functions = [lambda: Pair(2), lambda: Pair(3)]
    ours = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "pairs")
    with pytest.raises(EnvironmentFailed, match=r"1 \(pairs\) failed in reset: .* another length"):
        ours.reset(seed=0)


def test_wrong_lengths_that_add_up_to_the_right_one_are_found() -> None:
    class Longer(Scripted):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
            self.length = length

        def observation(self) -> Any:
            return np.zeros(self.length, np.float32)

    functions = [lambda: Longer(3), lambda: Longer(5)]
    ours = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "lengths")
    with pytest.raises(EnvironmentFailed, match=r"0 \(lengths\) failed in reset: .*shape \[3\]"):
        ours.reset(seed=0)


def test_observations_without_numbers_keep_their_shape() -> None:
    class Empty(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(-1, 1, (3, 0), np.float32)

        def observation(self) -> Any:
            return np.zeros((3, 0), np.float32)

    ours = EnvironmentsInTurn([Empty] * 2, AutoresetMode.SAME_STEP, "empty")
    assert ours.reset(seed=0)[0].shape == (2, 3, 0)
    assert ours.step(np.zeros(2, int))[0].shape == (2, 3, 0)


@pytest.mark.parametrize("name", ["final_info", "final_obs", "action_mask"])
def test_a_number_with_a_name_of_gymnasiums_is_not_gathered(name: str) -> None:
    class Naming(Scripted):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"speed": 2.0, name: 3})

    functions = [lambda: Naming(((2, "truncated"),)), lambda: Naming(((1, "truncated"),))]
    ours = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "naming")
    ours.reset(seed=0)
    infos = ours.step(np.zeros(2, int))[-1]
    assert infos["speed"][0] == infos["final_info"]["speed"][1] == 2.0
    assert isinstance(infos["final_obs"][1], np.ndarray)
    ours.step(np.zeros(2, int))


@pytest.mark.parametrize("make", [Scripted, trees])
@pytest.mark.parametrize("count", [2, 4])
def test_a_wrong_number_of_actions_is_the_callers_mistake(make: Any, count: int) -> None:
    functions = [functools.partial(make, script) for script in SCRIPTS]
    env = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "toy")
    env.reset(seed=0)
    actions = batch_space(env.single_action_space, count).sample()
    with pytest.raises(ValueError, match=f"^{count} actions for 3 environments$"):
        env.step(actions)
    assert [each.unwrapped.steps for each in env.envs] == [0, 0, 0]


def begin(env: EnvironmentsInTurn) -> None:
    env.reset(seed=0)
    env.step(np.zeros(2, int))


class Gives(Scripted):
    """Changes what a call returns."""

    def __init__(self, call: str, change: Callable[..., Any]) -> None:
        super().__init__()
        self.call, self.change = call, change

    def reset(self, **kwargs: Any) -> Any:
        returned = super().reset(**kwargs)
        return self.change(*returned) if self.call == "reset" else returned

    def step(self, action: Any) -> Any:
        returned = super().step(action)
        return self.change(*returned) if self.call == "step" else returned


def rewarded(reward: Any) -> Callable[..., Any]:
    return lambda seen, _, *others: (seen, reward, *others)


@pytest.mark.parametrize(
    ("call", "change", "words"),
    [
        ("reset", lambda seen, info: seen[:2], r"return \(observation, info\), as"),
        ("step", lambda *told: (*told[:3], told[4]), r"return \(.*, truncated, info\)"),
        ("step", lambda *told: (*told[:4], None), r"return \(observation, reward"),
        ("step", rewarded([1.0, 2.0]), r"return a number as the reward \("),
        ("step", rewarded({"a": 1.0}), r"return a number as the reward \("),
        ("step", rewarded(None), r"return a number as the reward \("),
        ("step", rewarded("1.0"), r"return a number as the reward \('1.0' is not a float\)"),
        (
            "step",
            rewarded(np.ones(1)),
            r"return .* reward \(float64 of shape \[1\]; return its item",
        ),
        ("step", rewarded(np.ones(2)), r"return .* \(float64 of shape \[2\]\); if it has a reward"),
        (
            "step",
            lambda *told: (*told[:4], ["x"]),
            r"return .*, info\).* \(its info is of type list",
        ),
    ],
)
def test_what_an_environment_must_return_is_told(
    call: str, change: Callable[..., Any], words: str
) -> None:
    functions = [Scripted, functools.partial(Gives, call, change)]
    ours = EnvironmentsInTurn(functions, AutoresetMode.SAME_STEP, "toy")
    with pytest.raises(
        EnvironmentFailed, match=rf"1 \(toy\) failed in {call}: it must {words}"
    ) as caught:
        begin(ours)
    assert not caught.value.traceback, "it would show Juggler's own lines"


def test_an_error_raised_without_a_line_of_python_is_not_blamed_on_a_reward() -> None:
    def raising() -> Scripted:
        env = Scripted()
        env.step = {}.__getitem__
        return env

    ours = EnvironmentsInTurn([Scripted, raising], AutoresetMode.SAME_STEP, "toy")
    with pytest.raises(EnvironmentFailed, match=r"1 \(toy\) failed in step: KeyError"):
        begin(ours)


def steps(env: EnvironmentsInTurn, count: int) -> None:
    for _ in range(count):
        env.step(np.zeros(2, int))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(("call", "at"), [("reset", 1), ("step", 2)])
def test_a_failure_says_which_environment_failed_in_what(
    mode: AutoresetMode, call: str, at: int
) -> None:
    functions = [Scripted, functools.partial(Failing, call, at=at)]
    ours = EnvironmentsInTurn(functions, mode, "toy")
    ours.reset(seed=0)
    expected = rf"environment 1 \(toy\) failed in {call}: RuntimeError: the cube"
    with pytest.raises(EnvironmentFailed, match=expected) as caught:
        steps(ours, 4)
    assert "in the_guilty_line" in caught.value.traceback


# What holds an EnvRunner up is read off its stack.


class Looking(gymnasium.Env[Any, Any]):
    """Notes what its own thread is in, wherever `where` says."""

    observation_space = action_space = Discrete(2)

    def __init__(self, seen: list[str], where: str) -> None:
        self.seen, self.where = seen, where
        self._look("constructor")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._look("reset")
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._look("step")
        return 0, 0.0, self.where == "reset", False, {}

    def _look(self, where: str) -> None:
        if where == self.where:
            self.seen.append(environment_in(_here()))


class Two(VectorEnv[Any, Any, Any]):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def step(self, actions: Any) -> Any:
        self.seen.append(environment_in(_here()))


def _here() -> FrameType:
    return sys._current_frames()[threading.get_ident()]


@pytest.mark.parametrize("call", ["step", "reset"])
def test_the_environment_and_its_call_are_named(call: str) -> None:
    seen: list[str] = []
    makers = [lambda: Looking([], ""), lambda: Looking(seen, call)]
    env = EnvironmentsInTurn(makers, AutoresetMode.SAME_STEP, "Looking")
    env.reset()
    env.step(np.zeros(2, np.int64))
    assert set(seen) == {f"{call} of environment 1 (Looking)"}
    assert len(seen) == (1 if call == "step" else 2), "at the start, and at an episode's end"


def test_environments_that_step_together_are_named_by_their_class() -> None:
    seen: list[str] = []
    VectorWrapper(Two(seen)).step(None)
    assert seen == ["step of Two"]


def test_a_constructor_is_named_as_such() -> None:
    seen: list[str] = []
    make_vector_env(EnvRunnerConfig(env="Looking"), lambda: Looking(seen, "constructor")).close()
    assert set(seen) == {"the constructor of an environment"}
