"""BatchStore: observations and actions that do not fit the spaces of a module are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from support.batch_stores import TWO, VECTOR, World, refused

from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import UnsupportedSpace


def test_actions_may_be_of_less_precision_than_their_space(world: World) -> None:
    store = world.open(action_space=spaces.Box(-1, 1, (1,), np.float64))
    actions = np.zeros((3, 6, 1), np.float32)
    assert store.take(world.frame(actions=actions)) == ""


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-10, 10, (5,), np.float32),
        spaces.Box(-10, 10, (4, 1), np.float32),
        spaces.Box(-10, 10, (), np.float32),
        spaces.Box(-10, 10, (4,), np.float64),
        spaces.Box(0, 10, (4,), np.uint8),
    ],
    ids=str,
)
def test_observations_of_another_space_arerefused(world: World, space: Space[Any]) -> None:
    reason = refused(world, world.open(observation_space=space), world.frame())
    assert reason.startswith("default: observations of shape [N, T, *(4,)] and dtype float32")
    assert str(space) in reason


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (TWO, np.zeros((3, 6), np.float32)),
        (TWO, np.zeros((3, 6), np.bool_)),
        (TWO, np.zeros((3, 6, 1), np.int64)),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros((3, 6, 3), np.float32)),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros((3, 6, 2), np.int64)),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros((3, 6), np.float32)),
    ],
)
def test_actions_of_another_space_arerefused(
    world: World, space: Space[Any], actions: np.ndarray
) -> None:
    reason = refused(world, world.open(action_space=space), world.frame(actions=actions))
    assert reason.startswith("default: actions of shape")
    assert str(space) in reason


@pytest.mark.parametrize(
    ("space", "allowed", "beyond"),
    [
        (spaces.Discrete(2), (0, 1), (-1, 2)),
        (spaces.Discrete(3, start=5), (5, 7), (4, 8)),
        (spaces.Discrete(2, start=-1), (-1, 0), (-2, 1)),
    ],
    ids=str,
)
def test_a_discrete_action_out_of_range_is_refused(
    world: World, space: spaces.Discrete[Any], allowed: tuple[int, int], beyond: tuple[int, int]
) -> None:
    store = world.open(action_space=space)

    def frame(batch_id: int, action: int) -> BatchFrame:
        actions = np.full((3, 6), allowed[0])
        actions[2, 5] = action
        return world.frame(batch_id, actions=actions)

    for batch_id, action in enumerate(allowed, start=1):
        assert store.take(frame(batch_id, action)) == ""
    for action in beyond:
        reason = refused(world, store, frame(3, action))
        assert reason == f"default: actions hold a number outside {allowed[0]}..{allowed[1]}"


@pytest.mark.parametrize(
    ("space", "allowed", "beyond", "said"),
    [
        (
            spaces.MultiDiscrete([2, 3], start=[0, 4]),
            [[0, 4], [1, 6]],
            [[2, 4], [0, 3], [1, 7]],
            "[0, 4]..[1, 6]",
        ),
        (spaces.MultiBinary(2), [[0, 0], [1, 1]], [[0, 2], [-1, 0]], "0..1"),
    ],
    ids=str,
)
def test_what_is_counted_must_be_in_range_in_actions_and_observations(
    world: World, space: Space[Any], allowed: list[Any], beyond: list[Any], said: str
) -> None:
    def columns(value: Any) -> dict[str, Any]:
        every = np.full((3, 6, 2), allowed[0], space.dtype)
        observations = {"x": every[:, :, :1].astype(np.float32), "y": every.copy()}
        observations["y"][2, 5] = value
        last = {name: array[:, -1] for name, array in observations.items()}
        ends = np.zeros((3, 6), bool)
        final = {name: array[:0, 0] for name, array in observations.items()}
        return {
            "observations": observations,
            "last_observations": last,
            "final_observations": final,
            "truncated": ends,
            "actions": every,
        }

    observed = spaces.Dict({"x": spaces.Box(-9, 9, (1,), np.float32), "y": space})
    store = world.open(observation_space=observed, action_space=space)
    for batch_id, value in enumerate(allowed, start=1):
        assert store.take(world.frame(batch_id, **columns(value))) == ""
    for value in beyond:
        reason = refused(world, store, world.frame(9, **columns(value)))
        assert reason == f"default: observations/y hold a number outside {said}"
        acting = columns(allowed[0])
        acting["actions"] = acting["actions"].copy()
        acting["actions"][2, 5] = value
        reason = refused(world, store, world.frame(9, **acting))
        assert reason == f"default: actions hold a number outside {said}"
        last = columns(allowed[0])
        last["last_observations"]["y"] = last["last_observations"]["y"].copy()
        last["last_observations"]["y"][1] = value
        reason = refused(world, store, world.frame(9, **last))
        assert reason == f"default: last_observations/y hold a number outside {said}"


def test_observations_that_lack_or_have_an_array_too_many_arerefused(world: World) -> None:
    space = spaces.Dict({"x": VECTOR, "y": VECTOR})
    reason = refused(world, world.open(observation_space=space), world.frame())
    assert reason == "default: observations have an array at the root; expected: 'x', 'y'"


def test_a_space_that_nobody_encodes_is_refused_when_the_store_opens(world: World) -> None:
    with pytest.raises(UnsupportedSpace, match="Text"):
        world.open(observation_space=spaces.Text(3))
