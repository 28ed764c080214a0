"""What environments in turn and vectors give, and must give."""

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
import torch
from gymnasium import spaces
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from support.scripted_environments import (
    AsTrees,
    Masked,
    NativeAsTrees,
    NativeScripted,
    Scripted,
)

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.accepted_vector import AcceptedVector
from juggler.envrunner.environments.environments_in_turn import (
    EnvironmentsInTurn,
    keep_own_finals,
)
from juggler.envrunner.environments.vector import (
    EqualChoices,
    check_actions_faster,
    environment_in,
    make_vector_env,
)
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


@pytest.mark.parametrize("make", [Scripted, Counted, trees, masked])
def test_steps_and_resets_are_those_of_gymnasium(make: Any) -> None:
    functions = [functools.partial(make, script) for script in SCRIPTS]
    ours = EnvironmentsInTurn(functions, "scripted")
    theirs = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP)
    keep_own_finals(theirs)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert_same(ours.reset(seed=[3, 4, 5]), theirs.reset(seed=[3, 4, 5]))
    theirs.action_space.seed(0)
    for _ in range(20):
        actions = theirs.action_space.sample()
        found, expected = ours.step(actions), theirs.step(actions)
        leave_out_masks(expected[-1], expected[2])
        assert_same(found, expected)


def test_options_reach_the_environments() -> None:
    class Listening(Scripted):
        def reset(self, *, seed=None, options=None):
            self.heard = options
            return super().reset(seed=seed)

    ours = EnvironmentsInTurn([Listening] * 3, "listening")
    ours.reset(options={"level": 2})
    assert [env.heard for env in ours.envs] == [{"level": 2}] * 3


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
    ours = EnvironmentsInTurn(functions, "parts")
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
    ours = EnvironmentsInTurn(functions, "pairs")
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
    ours = EnvironmentsInTurn(functions, "lengths")
    with pytest.raises(EnvironmentFailed, match=r"0 \(lengths\) failed in reset: .*shape \[3\]"):
        ours.reset(seed=0)


def test_observations_without_numbers_keep_their_shape() -> None:
    class Empty(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(-1, 1, (3, 0), np.float32)

        def observation(self) -> Any:
            return np.zeros((3, 0), np.float32)

    ours = EnvironmentsInTurn([Empty] * 2, "empty")
    assert ours.reset(seed=0)[0].shape == (2, 3, 0)
    assert ours.step(np.zeros(2, int))[0].shape == (2, 3, 0)


@pytest.mark.parametrize("name", ["final_info", "final_obs", "action_mask"])
def test_a_number_with_a_name_of_gymnasiums_is_not_gathered(name: str) -> None:
    class Naming(Scripted):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"speed": 2.0, name: 3})

    functions = [lambda: Naming(((2, "truncated"),)), lambda: Naming(((1, "truncated"),))]
    ours = EnvironmentsInTurn(functions, "naming")
    ours.reset(seed=0)
    infos = ours.step(np.zeros(2, int))[-1]
    assert infos["speed"][0] == infos["final_info"]["speed"][1] == 2.0
    assert isinstance(infos["final_obs"][1], np.ndarray)
    ours.step(np.zeros(2, int))


@pytest.mark.parametrize("make", [Scripted, trees])
@pytest.mark.parametrize("count", [2, 4])
def test_a_wrong_number_of_actions_is_the_callers_mistake(make: Any, count: int) -> None:
    functions = [functools.partial(make, script) for script in SCRIPTS]
    env = EnvironmentsInTurn(functions, "toy")
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
    ours = EnvironmentsInTurn(functions, "toy")
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

    ours = EnvironmentsInTurn([Scripted, raising], "toy")
    with pytest.raises(EnvironmentFailed, match=r"1 \(toy\) failed in step: KeyError"):
        begin(ours)


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
    env = EnvironmentsInTurn(makers, "Looking")
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


# Results of a vector that steps its environments in its own way.


N = 4


class Giving(NativeScripted):
    """Replaces one of a step's results, or all observations."""

    def __init__(self, place: int, given: Any, dtype: Any = np.float32) -> None:
        super().__init__([((9, "terminated"),)] * N, AutoresetMode.SAME_STEP)
        self.single_observation_space = spaces.Box(0, 255, (3,), dtype)
        self.place, self.given = place, given

    def reset(self, **arguments: Any) -> Any:
        observations, infos = super().reset(**arguments)
        return self.given if self.place == 0 else observations, infos

    def step(self, actions: Any) -> Any:
        results = list(super().step(actions))
        results[self.place] = self.given
        return tuple(results)


def begin_vector(env: Any) -> Any:
    vector = AcceptedVector(env, f"one of {N} environments (toy)")
    vector.reset(seed=1)
    return vector.step(np.zeros(N, int))


@pytest.mark.parametrize(
    ("dtype", "given", "words"),
    [
        (np.float32, np.zeros(3, np.float32), r"float32 of shape \[3\]"),
        (np.float32, np.zeros((N, 1), np.float32), r"float32 of shape \[4, 1\]"),
        (np.uint8, np.full((N, 3), 0.7), r"float64 of shape \[4, 3\]"),
        (np.uint8, np.full((N, 3), 300), r"int64 of shape \[4, 3\]"),
    ],
)
def test_observations_are_not_repeated_for_all_environments_or_cut_off(dtype, given, words) -> None:
    due = rf"a vector of 4 must give {np.dtype(dtype)} of shape \[4, 3\]"
    expected = rf"4 environments \(toy\) failed in reset: its observations are {words}: {due}"
    with pytest.raises(EnvironmentFailed, match=expected):
        begin_vector(Giving(0, given, dtype))


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        (1, 1.0, "rewards are float64 of shape"),
        (1, np.zeros((N, 1)), r"rewards are float64 of shape \[4, 1\]"),
        (2, False, "terminated are bool of shape"),
        (3, np.full((N, 1), 0.0), r"truncated are float64 of shape \[4, 1\]"),
        (3, np.full(N, "no"), r"truncated are <U2 of shape \[4\]"),
    ],
)
def test_a_step_is_not_that_of_one_environment_for_all(place: int, given: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"failed in step: its {words}"):
        begin_vector(Giving(place, given))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.uint8, np.bool_, object, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("place", [2, 3])
def test_ends_of_episodes_may_be_numbers_or_objects(place: int, dtype: Any) -> None:
    ends = [False, True, True, False]
    if isinstance(dtype, torch.dtype):
        given: Any = torch.tensor(ends).to(dtype)
    else:
        given = np.array(ends).astype(dtype)
    flags = begin_vector(Giving(place, given))[place]
    assert flags.dtype in (np.bool_, torch.bool)
    assert flags.tolist() == ends


def test_a_part_of_observations_that_is_lacking_or_wrong_is_named() -> None:
    class Parts(NativeAsTrees):
        lacking = False

        def reset(self, **arguments: Any) -> Any:
            observations, infos = super().reset(**arguments)
            if self.lacking:
                del observations["count"]
            else:
                observations["count"] = observations["count"][:1]
            return observations, infos

    env = Parts(NativeScripted([((9, "terminated"),)] * N, AutoresetMode.SAME_STEP))
    vector = AcceptedVector(env, "it")
    with pytest.raises(EnvironmentFailed, match="observations at 'count' are int64"):
        vector.reset(seed=1)
    env.lacking = True
    with pytest.raises(EnvironmentFailed, match=r"other parts than Dict.*KeyError: 'count'"):
        vector.reset(seed=1)


# `terminated` and `truncated` are true or false: a step that says something else is an error.


class Says(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminated: Any = False, truncated: Any = False) -> None:
        self.ends = terminated, truncated

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, *self.ends, {}


def vector(vectorize: str, **env_kwargs: Any) -> VectorEnv[Any, Any, Any]:
    config = EnvRunnerConfig(env="mine", envs_per_runner=2, vectorize=vectorize)
    return make_vector_env(config, functools.partial(Says, **env_kwargs))


@pytest.mark.parametrize(
    ("vectorize", "ends", "said"),
    [
        ("sync", {"terminated": "yes"}, "terminated must be True or False"),
        ("async", {"truncated": "no"}, "truncated must be True or False, not 'no'"),
        ("sync", {"truncated": None}, "truncated must be True or False, not None"),
        ("sync", {"terminated": [True, False]}, "terminated must be True or False"),
        ("sync", {"terminated": np.ones(2, np.bool_)}, "must be True or False, not array("),
        ("sync", {"truncated": 2}, "truncated must be True or False, not 2"),
        ("sync", {"truncated": float("nan")}, "truncated must be True or False, not nan"),
    ],
)
def test_what_is_neither_true_nor_false_is_refused_in_a_sentence(
    vectorize: str, ends: Any, said: str
) -> None:
    env = vector(vectorize, **ends)
    try:
        env.reset(seed=0)
        with pytest.raises(EnvironmentFailed) as failed:
            env.step(np.zeros(2, np.int64))
    finally:
        env.close()
    assert said in failed.value.reason
    assert not failed.value.traceback


@pytest.mark.parametrize(
    ("vectorize", "yes"),
    [("sync", each) for each in (True, np.True_, np.array(True), 1, np.ones(1), np.int8(1))]
    + [("async", 1)],
)
def test_what_is_true_may_also_be_a_number_or_an_array_of_one(vectorize: str, yes: Any) -> None:
    env = vector(vectorize, terminated=yes, truncated=0)
    try:
        env.reset(seed=0)
        _, _, terminated, truncated, _ = env.step(np.zeros(2, np.int64))
    finally:
        env.close()
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert terminated.tolist() == [True, True]
    assert truncated.tolist() == [False, False]


# The faster look at actions says what Gymnasium's says.


LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Vector(VectorEnv[Any, Any, Any]):
    def __init__(self, action_space: Space[Any]) -> None:
        self.action_space = action_space


@pytest.mark.parametrize(
    "actions",
    [
        np.array([0, 1, 2]),
        np.array([2, 2, 2])[::-1],
        np.array([0, 1, 3]),
        np.array([0, -1, 2]),
        np.array([LEAST, 0, 0]),
        np.array([0, 0, MOST]),
        np.array([0, 1]),
        np.array([[0, 1, 2]]),
        np.array(0),
        np.array([0, 1, 2], np.int32),
        np.array([0, 1, 4], np.int32),
        np.array([0, 1, 2], np.uint64),
        np.array([0.0, 1.0, 2.0]),
        [0, 1, 2],
        (0, 1, 3),
        "012",
        None,
    ],
    ids=repr,
)
def test_the_same_actions_are_valid(actions: Any) -> None:
    env = Vector(MultiDiscrete([3, 3, 3]))
    check_actions_faster(env)
    assert type(env.action_space) is EqualChoices
    assert env.action_space.contains(actions) is MultiDiscrete([3, 3, 3]).contains(actions)


@pytest.mark.parametrize(
    "space",
    [
        MultiDiscrete([3, 2]),
        MultiDiscrete([3, 3], start=[1, 1]),
        MultiDiscrete([3, 3], dtype=np.int32),
        Discrete(3),
    ],
    ids=repr,
)
def test_other_spaces_stay_as_they_are(space: Space[Any]) -> None:
    env, before = Vector(space), type(space)
    check_actions_faster(env)
    assert env.action_space is space
    assert type(space) is before
