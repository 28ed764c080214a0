"""BatchStore: which batches it takes, which it refuses and why, and what it gives away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces

from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.validation import BatchValidator
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
GENERATION = 5  # of the group when the learner joined it


@dataclass
class World:
    """A store, and what it reported."""

    make_batch: MakeBatch
    arrivals: list[HeldBatch] = field(default_factory=list)

    def open(
        self,
        observation_space: Space[Any] = VECTOR,
        action_space: Space[Any] = TWO,
        **options: Any,
    ) -> BatchStore:
        by_module = {"default": (observation_space, action_space)}
        store = BatchStore(by_module, self.arrivals.append, **options)
        store.serve(joined=GENERATION)
        return store

    def frame(
        self,
        batch_id: int = 1,
        *,
        generation: int = GENERATION,
        live_steps: int | None = None,
        tree: Any = None,
        **columns: Any,
    ) -> BatchFrame:
        """A batch as it comes from the wire: good, but for what is said here."""
        batch = self.make_batch(seed=batch_id, **columns)
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id,
            envrunner="envrunner-3",
            generation=generation,
            live_steps=batch.live_steps if live_steps is None else live_steps,
            version=training_pb2.WeightsVersion(generation=4, update=batch_id),
        )
        tree = {"default": batch.to_tree()} if tree is None else tree
        (chunk,) = encode_frame(header, tree)
        frame = FrameReader(episodes_pb2.BatchHeader).feed(chunk)
        assert frame is not None
        return frame


@pytest.fixture
def world(make_batch: MakeBatch) -> Iterator[World]:
    made = World(make_batch)
    yield made
    taken = [held.batch_id for held in made.arrivals]
    assert len(taken) == len(set(taken)), "a batch was reported twice"


def _refused(world: World, store: BatchStore, frame: BatchFrame) -> str:
    """Why; and that nothing of it stays behind."""
    before = len(world.arrivals)
    try:
        reason = store.take(frame)
    except WireError as error:
        reason = str(error)
    assert reason
    assert len(world.arrivals) == before, "a refused batch was reported"
    return reason


# -- what is taken --------------------------------------------------------------------------------


def test_a_batch_is_held_with_what_its_header_said(world: World) -> None:
    store = world.open()
    frame = world.frame(7)
    assert store.take(frame) == ""
    (held,), missing = store.pop([7])
    assert missing == []
    assert (held.batch_id, held.envrunner, held.version) == (7, "envrunner-3", (4, 7))
    assert held.live_steps == frame.header.live_steps
    assert isinstance(frame.tree, dict)
    for name, column in frame.tree["default"].items():
        np.testing.assert_array_equal(getattr(held.modules["default"], name), column)


def test_each_arrival_is_reported_once_when_it_is_taken(world: World) -> None:
    store = world.open()
    for batch_id in (3, 1, 2):
        assert store.take(world.frame(batch_id)) == ""
        assert world.arrivals[-1].batch_id == batch_id
    store.pop([1, 2, 3])
    assert [held.batch_id for held in world.arrivals] == [3, 1, 2]


def test_batches_are_given_in_the_order_asked_for_and_only_once(world: World) -> None:
    store = world.open()
    for batch_id in (1, 2, 3, 4):
        store.take(world.frame(batch_id))
    held, missing = store.pop([3, 1])
    assert [batch.batch_id for batch in held] == [3, 1]
    assert missing == []
    held, missing = store.pop([1, 4, 3, 2])
    assert [batch.batch_id for batch in held] == [4, 2]
    assert missing == [1, 3]


def test_batches_that_never_came_are_named_in_the_order_asked_for(world: World) -> None:
    store = world.open()
    store.take(world.frame(2))
    held, missing = store.pop([9, 2, 5])
    assert [batch.batch_id for batch in held] == [2]
    assert missing == [9, 5]
    assert store.pop([]) == ([], [])


def test_a_batch_asked_for_twice_at_once_is_given_once(world: World) -> None:
    store = world.open()
    store.take(world.frame(1))
    held, missing = store.pop([1, 1])
    assert [batch.batch_id for batch in held] == [1]
    assert missing == [1]


def test_a_batch_for_a_later_generation_is_taken(world: World) -> None:
    assert world.open().take(world.frame(generation=GENERATION + 3)) == ""


def test_batches_of_a_store_that_joined_no_group_yet_are_taken(world: World) -> None:
    store = BatchStore({"default": (VECTOR, TWO)}, world.arrivals.append)
    assert store.take(world.frame(generation=1)) == ""


def test_actions_may_be_of_less_precision_than_their_space(world: World) -> None:
    store = world.open(action_space=spaces.Box(-1, 1, (1,), np.float64))
    actions = np.zeros((3, 6, 1), np.float32)
    assert store.take(world.frame(actions=actions)) == ""


# -- what is refused ------------------------------------------------------------------------------


def test_something_else_than_a_branch_of_modules_is_refused(world: World) -> None:
    store = world.open()
    for tree in (np.zeros(3), {}):
        reason = _refused(world, store, world.frame(tree=tree))
        assert reason == "a batch must be a branch of modules"


def test_a_module_that_this_learner_does_not_train_is_named(world: World) -> None:
    store = world.open()
    tree = world.frame().tree
    assert isinstance(tree, dict)
    for modules in ({"other": tree["default"]}, {**tree, "other": tree["default"]}):
        reason = _refused(world, store, world.frame(tree=modules))
        assert reason == "unknown modules ['other']: expected ['default']"


def test_a_batch_of_wrong_columns_is_refused_with_their_name(world: World) -> None:
    tree = world.frame().tree
    assert isinstance(tree, dict)
    wrong = {**tree["default"], "rewards": tree["default"]["rewards"].astype(np.float64)}
    reason = _refused(world, world.open(), world.frame(tree={"default": wrong}))
    assert "column 'rewards' must be float32" in reason


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
def test_observations_of_another_space_are_refused(world: World, space: Space[Any]) -> None:
    reason = _refused(world, world.open(observation_space=space), world.frame())
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
def test_actions_of_another_space_are_refused(
    world: World, space: Space[Any], actions: np.ndarray
) -> None:
    reason = _refused(world, world.open(action_space=space), world.frame(actions=actions))
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
        reason = _refused(world, store, frame(3, action))
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
        reason = _refused(world, store, world.frame(9, **columns(value)))
        assert reason == f"default: observations/y hold a number outside {said}"
        acting = columns(allowed[0])
        acting["actions"] = acting["actions"].copy()
        acting["actions"][2, 5] = value
        reason = _refused(world, store, world.frame(9, **acting))
        assert reason == f"default: actions hold a number outside {said}"
        last = columns(allowed[0])
        last["last_observations"]["y"] = last["last_observations"]["y"].copy()
        last["last_observations"]["y"][1] = value
        reason = _refused(world, store, world.frame(9, **last))
        assert reason == f"default: last_observations/y hold a number outside {said}"


def test_choices_that_are_bytes_stay_as_they_were_checked(make_batch: MakeBatch) -> None:
    """Whoever sent them may still be able to change the memory in which they came."""
    space = spaces.MultiDiscrete([2, 3], dtype=np.uint8)
    pixels = np.zeros((3, 6, 4), np.uint8)
    choices = np.ones((3, 6, 2), np.uint8)
    batch = make_batch(
        observations={"x": pixels, "y": choices},
        last_observations={"x": pixels[:, 0], "y": choices[:, 0]},
        final_observations={"x": pixels[:0, 0], "y": choices[:0, 0]},
        truncated=np.zeros((3, 6), bool),
    )
    observed = spaces.Dict({"x": spaces.Box(0, 255, (4,), np.uint8), "y": space})
    checked: Any = BatchValidator("default", observed, TWO, {}).checked(batch)
    choices[:] = pixels[:] = 200
    assert checked.observations["y"].max() == checked.last_observations["y"].max() == 1
    assert checked.observations["x"].min() == 200, "images are not copied"


def test_observations_that_lack_or_have_an_array_too_many_are_refused(world: World) -> None:
    space = spaces.Dict({"x": VECTOR, "y": VECTOR})
    reason = _refused(world, world.open(observation_space=space), world.frame())
    assert reason == "default: observations have an array at the root; expected: 'x', 'y'"


def test_a_space_that_nobody_encodes_is_refused_when_the_store_opens(world: World) -> None:
    with pytest.raises(UnsupportedSpace, match="Text"):
        world.open(observation_space=spaces.Text(3))


@pytest.mark.parametrize("error", [-1, 1])
def test_a_header_that_counts_other_live_steps_is_refused(world: World, error: int) -> None:
    found = world.frame().header.live_steps
    reason = _refused(world, world.open(), world.frame(live_steps=found + error))
    assert reason == f"header says {found + error} live steps, found {found}"


def test_a_batch_for_a_predecessor_is_refused(world: World) -> None:
    reason = _refused(world, world.open(), world.frame(9, generation=GENERATION - 1))
    assert reason == f"batch 9 is for generation {GENERATION - 1}, before {GENERATION}"


def test_a_batch_that_comes_again_is_refused_used_or_not(world: World) -> None:
    store = world.open()
    store.take(world.frame(1))
    assert _refused(world, store, world.frame(1)) == "batch 1 came before"
    store.pop([1])
    assert _refused(world, store, world.frame(1)) == "batch 1 came before"
    assert store.pop([1]) == ([], [1])


def test_a_batch_that_was_refused_may_come_again(world: World) -> None:
    store = world.open()
    _refused(world, store, world.frame(1, live_steps=0))
    assert store.take(world.frame(1)) == ""


def test_a_full_store_refuses_until_batches_are_used(world: World) -> None:
    store = world.open(capacity=2)
    assert store.take(world.frame(1)) == ""
    assert store.take(world.frame(2)) == ""
    assert _refused(world, store, world.frame(3)) == "2 batches wait here already"
    store.pop([2])
    assert store.take(world.frame(3)) == ""


def test_batches_take_no_more_memory_than_they_may(world: World) -> None:
    size = sum(array.nbytes for _, array in flatten(world.frame(1).tree))
    store = world.open(capacity_bytes=5 * size // 2)
    assert store.take(world.frame(1)) == ""
    assert store.take(world.frame(2)) == ""
    held = size + sum(array.nbytes for _, array in flatten(world.frame(2).tree))
    assert _refused(world, store, world.frame(3)) == f"{held} bytes of batches wait here already"
    store.pop([1])
    assert store.take(world.frame(3)) == ""


def test_ids_are_remembered_no_longer_than_the_store_is_large(world: World) -> None:
    store = world.open(capacity=2)
    for batch_id in (1, 2, 3):
        assert store.take(world.frame(batch_id)) == ""
        store.pop([batch_id])
    assert _refused(world, store, world.frame(2)) == "batch 2 came before"
    assert _refused(world, store, world.frame(3)) == "batch 3 came before"
