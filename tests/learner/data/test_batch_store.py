"""BatchStore: which batches it takes, which it refuses and why, and what it gives away."""

from __future__ import annotations

import numpy as np
import pytest
from support.batch_stores import GENERATION, TWO, VECTOR, World, refused

from juggler.learner.data.batch_store import BatchStore
from juggler.runtime.wire.trees import flatten

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


def test_a_batch_that_comes_again_is_refused_used_or_not(world: World) -> None:
    store = world.open()
    store.take(world.frame(1))
    assert refused(world, store, world.frame(1)) == "batch 1 came before"
    store.pop([1])
    assert refused(world, store, world.frame(1)) == "batch 1 came before"
    assert store.pop([1]) == ([], [1])


def test_a_batch_that_was_refused_may_come_again(world: World) -> None:
    store = world.open()
    refused(world, store, world.frame(1, live_steps=0))
    assert store.take(world.frame(1)) == ""


def test_a_full_store_refuses_until_batches_are_used(world: World) -> None:
    store = world.open(capacity=2)
    assert store.take(world.frame(1)) == ""
    assert store.take(world.frame(2)) == ""
    assert refused(world, store, world.frame(3)) == "2 batches wait here already"
    store.pop([2])
    assert store.take(world.frame(3)) == ""


def test_batches_take_no_more_memory_than_they_may(world: World) -> None:
    size = sum(array.nbytes for _, array in flatten(world.frame(1).tree))
    store = world.open(capacity_bytes=5 * size // 2)
    assert store.take(world.frame(1)) == ""
    assert store.take(world.frame(2)) == ""
    held = size + sum(array.nbytes for _, array in flatten(world.frame(2).tree))
    assert refused(world, store, world.frame(3)) == f"{held} bytes of batches wait here already"
    store.pop([1])
    assert store.take(world.frame(3)) == ""


def test_ids_are_remembered_no_longer_than_the_store_is_large(world: World) -> None:
    store = world.open(capacity=2)
    for batch_id in (1, 2, 3):
        assert store.take(world.frame(batch_id)) == ""
        store.pop([batch_id])
    assert refused(world, store, world.frame(2)) == "batch 2 came before"
    assert refused(world, store, world.frame(3)) == "batch 3 came before"
