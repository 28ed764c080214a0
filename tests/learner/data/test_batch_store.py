"""BatchStore: batches that it accepts, refuses, and hands out."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from support.batches import GENERATION, TWO, VECTOR, World, refused

from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.collate import collate
from juggler.learner.data.validation import BatchValidator
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.frames import Frame
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import episodes_pb2

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


def test_each_arrival_is_reported_once_when_it_is_taken(world: World) -> None:
    store = world.open()
    for batch_id in (3, 1, 2):
        assert store.insert(world.frame(batch_id)) == ""
        assert world.arrivals[-1].batch_id == batch_id
    store.pop([1, 2, 3])
    assert [held.batch_id for held in world.arrivals] == [3, 1, 2]


def test_batches_are_given_in_the_order_asked_for_and_only_once(world: World) -> None:
    store = world.open()
    for batch_id in (1, 2, 3, 4):
        store.insert(world.frame(batch_id))
    held, missing = store.pop([3, 1])
    assert [batch.batch_id for batch in held] == [3, 1]
    assert missing == []
    held, missing = store.pop([1, 4, 3, 2])
    assert [batch.batch_id for batch in held] == [4, 2]
    assert missing == [1, 3]


def test_batches_that_never_came_are_named_in_the_order_asked_for(world: World) -> None:
    store = world.open()
    store.insert(world.frame(2))
    held, missing = store.pop([9, 2, 5])
    assert [batch.batch_id for batch in held] == [2]
    assert missing == [9, 5]
    assert store.pop([]) == ([], [])


def test_a_batch_for_a_later_generation_is_taken(world: World) -> None:
    assert world.open().insert(world.frame(generation=GENERATION + 3)) == ""


def test_batches_of_a_store_that_joined_no_group_yet_are_taken(world: World) -> None:
    store = BatchStore(BatchValidator("default", VECTOR, TWO, {}), world.arrivals.append)
    assert store.insert(world.frame(generation=1)) == ""


# -- what is refused ------------------------------------------------------------------------------


def test_something_else_than_a_branch_of_modules_isrefused(world: World) -> None:
    store = world.open()
    for tree in (np.zeros(3), {}):
        reason = refused(world, store, world.frame(tree=tree))
        assert reason == "a batch must be a branch of modules"


def test_a_module_that_this_learner_does_not_train_is_named(world: World) -> None:
    store = world.open()
    tree = world.frame().tree
    assert isinstance(tree, dict)
    for modules in ({"other": tree["default"]}, {**tree, "other": tree["default"]}):
        reason = refused(world, store, world.frame(tree=modules))
        assert reason == "unknown modules ['other']: expected ['default']"


def test_a_batch_of_wrong_columns_is_refused_with_their_name(world: World) -> None:
    tree = world.frame().tree
    assert isinstance(tree, dict)
    wrong = {**tree["default"], "rewards": tree["default"]["rewards"].astype(np.float64)}
    reason = refused(world, world.open(), world.frame(tree={"default": wrong}))
    assert "column 'rewards' must be float32" in reason


@pytest.mark.parametrize("error", [-1, 1])
def test_a_header_that_counts_other_live_steps_isrefused(world: World, error: int) -> None:
    found = world.frame().header.live_steps
    reason = refused(world, world.open(), world.frame(live_steps=found + error))
    assert reason == f"header says {found + error} live steps, found {found}"


def test_a_batch_for_a_predecessor_isrefused(world: World) -> None:
    reason = refused(world, world.open(), world.frame(9, generation=GENERATION - 1))
    assert reason == f"batch 9 is for generation {GENERATION - 1}, before {GENERATION}"


def test_a_batch_that_waits_is_refused_if_it_comes_again(world: World) -> None:
    store = world.open()
    store.insert(world.frame(1))
    assert refused(world, store, world.frame(1)) == "batch 1 is already here"
    assert len(store.pop([1])[0]) == 1


def test_a_batch_that_was_refused_may_come_again(world: World) -> None:
    store = world.open()
    refused(world, store, world.frame(1, live_steps=0))
    assert store.insert(world.frame(1)) == ""


def test_batches_take_no_more_memory_than_they_may(world: World) -> None:
    size = sum(array.nbytes for _, array in flatten(world.frame(1).tree))
    store = world.open(capacity_bytes=5 * size // 2)
    assert store.insert(world.frame(1)) == ""
    assert store.insert(world.frame(2)) == ""
    held = size + sum(array.nbytes for _, array in flatten(world.frame(2).tree))
    assert refused(world, store, world.frame(3)) == f"{held} bytes of batches are waiting already"
    store.pop([1])
    assert store.insert(world.frame(3)) == ""


OBSERVATION = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
N, T = 2, 4


def _store(action_space: gymnasium.Space[Any], states: Any = None) -> tuple[BatchStore, list[Any]]:
    arrived: list[HeldBatch] = []
    validator = BatchValidator("default", OBSERVATION, action_space, states or {})
    return BatchStore(validator, arrived.append), arrived


def _frame(batch_id: int, actions: Any, **columns: Any) -> Any:
    numbers = np.zeros(N, np.uint64)
    batch = EpisodeBatch(
        observations=np.zeros((N, T, 3), np.float32),
        actions=actions,
        rewards=np.zeros((N, T), np.float32),
        terminated=np.zeros((N, T), np.bool_),
        truncated=np.zeros((N, T), np.bool_),
        live=np.ones((N, T), np.bool_),
        action_logp=np.zeros((N, T), np.float32),
        last_observations=np.zeros((N, 3), np.float32),
        states={},
        final_observations=np.zeros((0, 3), np.float32),
        final_rows=np.zeros(0, np.int32),
        final_steps=np.zeros(0, np.int32),
        segment_episodes=np.arange(N, dtype=np.uint64),
        segment_rows=np.arange(N, dtype=np.int32),
        segment_starts=np.zeros(N, np.int32),
        segment_lengths=np.full(N, T, np.int32),
        segment_offsets=np.zeros(N, np.int32),
        segment_generations=numbers,
        segment_updates=numbers,
    )
    header = episodes_pb2.BatchHeader(batch_id=batch_id, live_steps=N * T)
    return Frame(header, {"default": {**batch.to_tree(), **columns}})


def test_actions_of_every_kind_come_in_the_dtypes_that_policies_act_in() -> None:
    space = gymnasium.spaces.Dict(
        {
            "bits": gymnasium.spaces.MultiBinary(2),
            "many": gymnasium.spaces.Tuple([gymnasium.spaces.MultiDiscrete([2, 3])]),
        }
    )
    store, arrived = _store(space)
    for batch_id, dtype in enumerate((np.int8, np.int64)):
        actions = {"bits": np.ones((N, T, 2), dtype), "many": {"0": np.ones((N, T, 2), dtype)}}
        assert store.insert(_frame(batch_id, actions)) == ""
    collated = collate([held.episodes for held in arrived])["actions"]
    assert collated["bits"].dtype == torch.int8
    assert collated["many"]["0"].dtype == torch.int64


STATES = {"module": {"h": np.zeros((5,), np.float32)}, "connectors": {"stack": np.zeros((), bool)}}


def _states(h: Any, stack: Any) -> dict[str, Any]:
    return {"module": {"h": h}, "connectors": {"stack": stack}}


def test_states_are_taken_as_the_module_has_them() -> None:
    store, arrived = _store(gymnasium.spaces.Discrete(2), states=STATES)
    good = _states(np.ones((N, 5), np.float32), np.ones(N, bool))
    assert store.insert(_frame(1, np.zeros((N, T), np.int64), states=good)) == ""
    assert arrived[0].episodes.states["module"]["h"].sum() == 5 * N


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({}, "states lack an array at"),
        (_states(np.ones((N, 4), np.float32), np.ones(N, bool)), "states/module/h of shape"),
        (_states(np.ones((N, 5)), np.ones(N, bool)), "dtype float64 do not fit"),
        (_states(np.ones((N, 5), np.float32), np.ones((N, 1), bool)), "states/connectors/stack of"),
    ],
)
def test_states_of_another_module_are_refused(states: Any, message: str) -> None:
    store, _ = _store(gymnasium.spaces.Discrete(2), states=STATES)
    with pytest.raises(WireError, match=r"^default: states") as raised:
        store.insert(_frame(1, np.zeros((N, T), np.int64), states=states))
    assert message in str(raised.value)


def test_states_that_nobody_expects_are_refused() -> None:
    store, _ = _store(gymnasium.spaces.Discrete(2))
    states = {"module": np.zeros(N)}
    with pytest.raises(WireError, match="default: states have an array at"):
        store.insert(_frame(1, np.zeros((N, T), np.int64), states=states))


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
