"""Results of a vector that steps its environments in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from support.scripted_environments import NativeAsTrees, NativeScripted
from support.tensor_vectors import TensorVector

from juggler.envrunner.environments.accepted_vector import AcceptedVector
from juggler.envrunner.failures import EnvironmentFailed

N = 4


def native() -> NativeScripted:
    return NativeScripted([((9, "terminated"),)] * N, AutoresetMode.SAME_STEP)


class Giving(NativeScripted):
    """Gives something else in place of one of a step's results, or of all observations."""

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


def begin(env: Any) -> Any:
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
        begin(Giving(0, given, dtype))


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        (
            1,
            1.0,
            r"rewards are float64 of shape \[\]: a vector of 4 must give float32 of shape \[4\]",
        ),
        (1, np.zeros((N, 1)), r"rewards are float64 of shape \[4, 1\]"),
        (2, False, r"terminated are bool of shape \[\]: .* must give bool of shape \[4\]"),
        (3, np.full((N, 1), 0.0), r"truncated are float64 of shape \[4, 1\]"),
        (3, np.full(N, "no"), r"truncated are <U2 of shape \[4\]"),
    ],
)
def test_a_step_is_not_that_of_one_environment_for_all(place: int, given: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"failed in step: its {words}"):
        begin(Giving(place, given))


@pytest.mark.parametrize(
    ("place", "given"),
    [(0, np.zeros((N, 3))), (1, [1] * N), (1, np.ones(N, int)), (2, np.zeros(N, np.uint8))],
)
def test_numbers_of_the_same_kind_may_have_another_width(place: int, given: Any) -> None:
    begin(Giving(place, given))


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
    flags = begin(Giving(place, given))[place]
    assert flags.dtype in (np.bool_, torch.bool)
    assert flags.tolist() == ends


def test_a_vector_that_gives_something_else_later_is_told_too() -> None:
    env = Giving(1, np.zeros(N))
    vector = AcceptedVector(env, "one of 4 environments (toy)")
    vector.reset(seed=1)
    vector.step(np.zeros(N, int))
    env.given = 0.5
    with pytest.raises(EnvironmentFailed, match="its rewards are float64"):
        vector.step(np.zeros(N, int))


@pytest.mark.parametrize("tensor", [torch.from_numpy, lambda x: torch.from_numpy(x)[:1]])
def test_tensors_are_held_to_the_same(tensor: Callable[..., Any]) -> None:
    rows = len(tensor(np.zeros(N)))
    if rows == N:
        begin(TensorVector(native(), tensor))
        return
    with pytest.raises(EnvironmentFailed, match=r"torch.float32 of shape \[1, 3\]: a vector of 4"):
        begin(TensorVector(native(), tensor))


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

    env = Parts(native())
    vector = AcceptedVector(env, "it")
    with pytest.raises(
        EnvironmentFailed, match=r"observations at 'count' are int64 of shape \[1\]"
    ):
        vector.reset(seed=1)
    env.lacking = True
    with pytest.raises(EnvironmentFailed, match=r"other parts than Dict.*KeyError: 'count'"):
        vector.reset(seed=1)
