"""Trees are taken apart and put together; paths that make no tree are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.wire_cases import trees

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import (
    Skeleton,
    check_paths,
    flatten,
    leaves,
    path_name,
    unflatten,
)

ONE = np.ones(1)


@given(trees)
def test_every_tree_is_put_together_again_from_its_leaves(tree: Any) -> None:
    taken_apart = list(leaves(tree))
    empty = [path for path, array in taken_apart if array is None]
    again = list(leaves(unflatten(flatten(tree), empty)))
    assert len(again) == len(taken_apart)
    assert {path: id(array) for path, array in again} == {
        path: id(array) for path, array in taken_apart
    }


def test_arrays_come_in_the_order_of_the_keys() -> None:
    tree = {"b": {"z": ONE, "a": ONE}, "a": ONE, "empty": {}}
    assert [path for path, _ in flatten(tree)] == [("b", "z"), ("b", "a"), ("a",)]


def test_a_tree_put_together_has_its_keys_in_the_order_they_had() -> None:
    tree = {"b": ONE, "c": {"z": {"y": ONE}, "a": ONE}, "a": ONE}
    assert repr(unflatten(flatten(tree))) == repr(tree)


def test_a_skeleton_can_be_filled_often_and_shares_no_branches() -> None:
    skeleton = Skeleton([("a", "b"), ("c",)], [("d",)])
    first, second = skeleton.fill([ONE, ONE]), skeleton.fill([2 * ONE, 3 * ONE])
    assert first == {"a": {"b": ONE}, "c": ONE, "d": {}}
    assert second == {"a": {"b": 2}, "c": 3, "d": {}}


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([], "neither"),
        ([("a",), ("b",), ("a",)], "twice"),
        ([("a",), ("a", "b")], "both"),
        ([("a", "b", "c"), ("a",)], "both"),
        ([(), ("a",)], "both"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths: list[tuple[str, ...]], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        check_paths(paths)
    with pytest.raises(WireError, match=complaint):
        unflatten([(path, ONE) for path in paths])


def test_a_branch_said_to_be_empty_must_be() -> None:
    with pytest.raises(WireError, match="both"):
        unflatten([(("a", "b"), ONE)], [("a",)])


@pytest.mark.parametrize("tree", [[ONE], {"a": 1.0}, {"a": {"b": None}}, {1: ONE}])
def test_what_is_no_tree_is_named(tree: Any) -> None:
    with pytest.raises(WireError, match="tree"):
        flatten(tree)


def test_the_name_of_a_path_is_one_short_line() -> None:
    name = path_name(("x\n" * 500, "weight"))
    assert len(name) <= 100
    assert "\n" not in name
    assert path_name(()) == "the root"
