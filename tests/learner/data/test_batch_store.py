"""BatchStore: batches that it accepts, refuses, and hands out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from support.batches import GENERATION, TWO, VECTOR, World, refused

from juggler.learner.data.batch_store import BatchStore
from juggler.learner.data.collate import collate
from juggler.learner.data.validation import BatchValidator
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.trees import flatten

# -- what is taken --------------------------------------------------------------------------------


def test_a_batch_is_held_with_what_its_header_said(world: World) -> None:
    store = world.open()
    frame = world.frame(7)
    assert store.insert(frame) == ""
    (held,), missing = store.pop([7])
    assert missing == []
    assert (held.batch_id, held.envrunner, held.version) == (7, "envrunner-3", (4, 7))
    assert [held.staleness(update) for update in (6, 7, 9)] == [0, 0, 2]
    assert held.live_steps == frame.header.live_steps
    assert isinstance(frame.tree, dict)
    for name, column in frame.tree["default"].items():
        np.testing.assert_array_equal(getattr(held.episodes, name), column)


def test_batches_are_reported_as_they_come_and_given_once_in_the_order_asked_for(
    world: World,
) -> None:
    store = world.open()
    for batch_id in (3, 1, 2, 4):
        assert store.insert(world.frame(batch_id)) == ""
        assert world.arrivals[-1].batch_id == batch_id

    def popped(*batch_ids: int) -> tuple[list[int], list[int]]:
        held, missing = store.pop([*batch_ids])
        return [each.batch_id for each in held], missing

    assert popped(3, 1) == ([3, 1], [])
    assert popped(1, 4, 9, 3, 2) == ([4, 2], [1, 9, 3])
    assert popped() == ([], [])


def test_a_batch_for_a_later_generation_is_taken(world: World) -> None:
    assert world.open().insert(world.frame(generation=GENERATION + 3)) == ""


def test_batches_of_a_store_that_joined_no_group_yet_are_taken(world: World) -> None:
    store = BatchStore(BatchValidator("default", VECTOR, TWO, {}), world.arrivals.append)
    assert store.insert(world.frame(generation=1)) == ""


# -- what is refused ------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_refused_with_what_is_wrong(world: World) -> None:
    own: Any = world.frame().tree
    columns = own["default"]
    unknown = "unknown modules ['other']: expected ['default']"
    for tree, said in (
        (np.zeros(3), "a batch must be a branch of modules"),
        ({}, "a batch must be a branch of modules"),
        ({"other": columns}, unknown),
        ({**own, "other": columns}, unknown),
        (
            {"default": {**columns, "rewards": columns["rewards"].astype(np.float64)}},
            "column 'rewards' must be float32",
        ),
    ):
        assert said in refused(world, world.open(), world.frame(tree=tree))


@pytest.mark.parametrize("error", [-1, 1])
def test_a_header_that_counts_other_live_steps_isrefused(world: World, error: int) -> None:
    found = world.frame().header.live_steps
    reason = refused(world, world.open(), world.frame(live_steps=found + error))
    assert reason == f"header says {found + error} live steps, found {found}"


def test_a_batch_for_a_predecessor_isrefused(world: World) -> None:
    reason = refused(world, world.open(), world.frame(9, generation=GENERATION - 1))
    assert reason == f"batch 9 is for generation {GENERATION - 1}, before {GENERATION}"


def test_a_batch_may_come_again_after_a_refusal_and_not_while_it_waits(world: World) -> None:
    store = world.open()
    refused(world, store, world.frame(1, live_steps=0))
    assert store.insert(world.frame(1)) == ""
    assert refused(world, store, world.frame(1)) == "batch 1 is already here"
    assert len(store.pop([1])[0]) == 1


def test_batches_take_no_more_memory_than_they_may(world: World) -> None:
    size = sum(array.nbytes for _, array in flatten(world.frame(1).tree))
    store = world.open(capacity_bytes=5 * size // 2)
    assert store.insert(world.frame(1)) == ""
    assert store.insert(world.frame(2)) == ""
    held = size + sum(array.nbytes for _, array in flatten(world.frame(2).tree))
    assert refused(world, store, world.frame(3)) == f"{held} bytes of batches are waiting already"
    store.pop([1])
    assert store.insert(world.frame(3)) == ""


def test_actions_of_every_kind_come_in_the_dtypes_that_policies_act_in(world: World) -> None:
    many = spaces.Tuple([spaces.MultiDiscrete([2, 3])])
    store = world.open(action_space=spaces.Dict({"bits": spaces.MultiBinary(2), "many": many}))
    for batch_id, dtype in enumerate((np.int8, np.int64), start=1):
        ones = np.ones((3, 6, 2), dtype)
        frame = world.frame(batch_id, actions={"bits": ones, "many": {"0": ones}})
        assert store.insert(frame) == ""
    collated = collate([held.episodes for held in world.arrivals])["actions"]
    assert collated["bits"].dtype == torch.int8
    assert collated["many"]["0"].dtype == torch.int64


STATES = {"module": {"h": np.zeros((5,), np.float32)}, "connectors": {"stack": np.zeros((), bool)}}


def _states(h: Any, stack: Any) -> dict[str, Any]:
    return {"module": {"h": h}, "connectors": {"stack": stack}}


def test_states_are_taken_as_the_module_has_them(world: World) -> None:
    good = _states(np.ones((3, 5), np.float32), np.ones(3, bool))
    assert world.open(states=STATES).insert(world.frame(states=good)) == ""
    assert world.arrivals[0].episodes.states["module"]["h"].sum() == 5 * 3


@pytest.mark.parametrize(
    ("expected", "states", "said"),
    [
        (STATES, {}, "states lack an array at"),
        (STATES, _states(np.ones((3, 4), "f4"), np.ones(3, bool)), "states/module/h of shape"),
        (STATES, _states(np.ones((3, 5)), np.ones(3, bool)), "dtype float64 do not fit"),
        (
            STATES,
            _states(np.ones((3, 5), "f4"), np.ones((3, 1), bool)),
            "states/connectors/stack of",
        ),
        ({}, {"module": np.zeros(3)}, "states have an array at"),
    ],
)
def test_states_of_another_module_are_refused(
    world: World, expected: Any, states: Any, said: str
) -> None:
    reason = refused(world, world.open(states=expected), world.frame(states=states))
    assert reason.startswith("default: states")
    assert said in reason


# BatchStore: observations and actions that do not fit the spaces of a module are refused.


def test_actions_may_be_of_less_precision_than_their_space(world: World) -> None:
    store = world.open(action_space=spaces.Box(-1, 1, (1,), np.float64))
    actions = np.zeros((3, 6, 1), np.float32)
    assert store.insert(world.frame(actions=actions)) == ""


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
        assert store.insert(world.frame(batch_id, **columns(value))) == ""
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
