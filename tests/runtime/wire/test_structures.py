"""Gymnasium's spaces as trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space

from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import check_paths, flatten, path_name, unflatten

BOX = spaces.Box(-1, 1, (2, 3), np.float32)
COUNT = spaces.Discrete(4, start=-2)
CHOICES = spaces.MultiDiscrete([2, 3], start=[5, 6])
BITS = spaces.MultiBinary((2, 2))
NESTED = spaces.Dict(
    {"a": BOX, "b": spaces.Tuple([COUNT, spaces.Dict({"c": CHOICES})]), "d": spaces.Tuple([BITS])}
)
LEAVES = [(("a",), BOX), (("b", "0"), COUNT), (("b", "1", "c"), CHOICES), (("d", "0"), BITS)]


@pytest.mark.parametrize("space", [BOX, COUNT, CHOICES, BITS], ids=str)
def test_a_space_of_single_arrays_is_its_own_only_leaf(space: Space[Any]) -> None:
    assert space_leaves(space) == [((), space)]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(3), "characters as numbers"),
        (spaces.Graph(BOX, None), "pad nodes"),
        (spaces.Sequence(COUNT), "pad them"),
        (spaces.OneOf([COUNT, BITS]), "in a Tuple"),
        (spaces.Dict({}), "nothing in it"),
        (spaces.Tuple([]), "nothing in it"),
        (spaces.Dict({1: COUNT}), "the key 1: keys must be strings"),
    ],
    ids=str,
)
def test_a_space_that_nobody_encodes_is_refused_with_what_to_do(
    space: Space[Any], message: str
) -> None:
    with pytest.raises(UnsupportedSpace, match=message):
        space_leaves(space)
    with pytest.raises(UnsupportedSpace, match=r"at 'x/1'"):
        space_leaves(spaces.Dict({"x": spaces.Tuple([BOX, space])}))


def test_a_space_of_another_library_is_refused() -> None:
    with pytest.raises(UnsupportedSpace, match="Discrete"):
        space_leaves(Space((3,), np.float32))


def test_zeros_have_shapes_and_dtypes_of_the_space_and_are_in_it() -> None:
    tree = zeros(NESTED, (5, 7))
    found = dict(flatten(tree))
    assert list(found) == [path for path, _ in LEAVES]
    for path, space in LEAVES:
        assert found[path].shape == (5, 7, *space.shape)
        assert found[path].dtype == space.dtype
    assert NESTED.contains(from_tree(NESTED, tree_map(lambda leaf: leaf[2, 3], tree)))
    assert zeros(COUNT) == -2


def test_a_batched_value_becomes_a_tree_and_comes_back_without_copies() -> None:
    batched = batch_space(NESTED, 3)
    value = batched.sample()
    tree = to_tree(NESTED, value)
    assert [path for path, _ in flatten(tree)] == [path for path, _ in LEAVES]
    assert tree["b"]["1"]["c"] is value["b"][1]["c"]
    back = from_tree(NESTED, tree)
    assert batched.contains(back)
    assert isinstance(back["b"], tuple)
    assert back["d"][0] is value["d"][0]


# Trees are taken apart and put together; paths that make no tree are refused.


ONE = np.ones(1)


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


@pytest.mark.parametrize("tree", [[ONE], {"a": 1.0}, {"a": {"b": None}}, {1: ONE}])
def test_what_is_no_tree_is_named(tree: Any) -> None:
    with pytest.raises(WireError, match="tree"):
        flatten(tree)


def test_the_name_of_a_path_is_one_short_line() -> None:
    name = path_name(("x\n" * 500, "weight"))
    assert len(name) <= 100
    assert "\n" not in name
    assert path_name(()) == "the root"
