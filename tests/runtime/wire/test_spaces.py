"""Gymnasium's spaces as messages and as trees."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space

from juggler.runtime.wire import spaces as wire_spaces
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import check_paths, flatten, path_name, unflatten
from juggler.runtime.wire.v1 import spaces_pb2 as pb
from juggler.runtime.wire.v1.tensors_pb2 import DType

INT64 = np.iinfo(np.int64)
UINT64_MAX = 2**64 - 1

BOXES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(-np.inf, np.inf, (2, 3)),
    spaces.Box(np.float32([-1, -np.inf]), np.float32([np.inf, 0.1])),
    spaces.Box(0.1, 0.3, (), np.float64),
    spaces.Box(-0.1, 0.1, (2,), np.float16),
    spaces.Box(0, 1, (0, 3)),
    spaces.Box(0, 1, (2, 2), np.bool_),
    spaces.Box(np.array([0, 1]), np.array([1, 1]), dtype=np.bool_),
    spaces.Box(np.array([[-5, 0]]), np.array([[3, 127]]), dtype=np.int8),
    spaces.Box(INT64.min, INT64.max, (2,), np.int64),
    spaces.Box(np.array([INT64.min, 3]), np.array([INT64.max, 2**53 + 1]), dtype=np.int64),
    spaces.Box(-np.inf, np.inf, (2,), np.int32),
    spaces.Box(-np.inf, np.array([1, 2]), dtype=np.int64),
    spaces.Box(0, UINT64_MAX, (2,), np.uint64),
    spaces.Box(np.zeros(2, np.uint64), np.uint64([1, UINT64_MAX]), dtype=np.uint64),
]
SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(3, start=-2, dtype=np.int8),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[1, 2], [3, 4]], start=[[1, 0], [-1, 0]], dtype=np.int16),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 3)),
    spaces.Text(4),
    spaces.Text(5, min_length=0, charset="zab\n\u00e9"),
    spaces.Dict(b=spaces.Discrete(2), a=spaces.Box(0, 1, (2,))),
    spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Dict())]),
    spaces.Tuple([spaces.Discrete(2), spaces.Tuple([])]),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    spaces.Graph(spaces.Discrete(2), None),
    spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    spaces.Sequence(spaces.Discrete(2)),
]


def travel(space: Space[Any]) -> Space[Any]:
    return space_from_message(pb.Space.FromString(space_to_message(space).SerializeToString()))


@pytest.mark.parametrize("space", [*BOXES, *SPACES], ids=str)
def test_every_space_arrives_as_it_was(space: Space[Any]) -> None:
    arrived = travel(space)
    assert arrived == space
    assert arrived.dtype == space.dtype
    assert repr(arrived) == repr(space)
    bounds = ("low", "high", "bounded_below", "bounded_above")
    for name in bounds if isinstance(space, spaces.Box) else ():
        sent, got = getattr(space, name), getattr(arrived, name)
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        np.testing.assert_array_equal(got, sent)


class Ragged(Space[Any]):
    """Derives from none of Gymnasium's kinds."""


class Angles(spaces.Box):
    """Derives from one of them."""


def test_a_space_of_a_derived_class_travels_as_its_base() -> None:
    plain = {"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(3)}
    derived = type("Parts", (spaces.Dict,), {})({**plain, "a": Angles(-1, 1, (3,))})
    assert space_from_message(space_to_message(derived)) == spaces.Dict(plain)


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        (Ragged(), "no encoding for the space"),
        (spaces.Tuple([Ragged()]), "no encoding for the space .*Ragged"),
        (spaces.OneOf([spaces.Discrete(2)]), "give all of its spaces in a Tuple"),
        (spaces.Dict({1: spaces.Discrete(2)}), "strings, not 1"),  # type: ignore[dict-item]
        (spaces.Box(0, 2**63 + 1, (2,), np.uint64), "bound 9223372036854775809"),
        (spaces.Discrete(UINT64_MAX, dtype=np.uint64), "out of range"),
        (spaces.Text(3, charset="\ud800"), "cannot be sent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_space_that_cannot_be_sent_is_named(space: Space[Any], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        space_to_message(space)


@patch.object(wire_spaces, "MAX_ELEMENTS", 30)
def test_spaces_with_too_many_elements_together_cannot_be_sent() -> None:
    each = spaces.Box(0, 1, (5, 4), np.uint8)  # within the limit
    with pytest.raises(WireError, match="elements"):
        space_to_message(spaces.Tuple([each, each]))


def box(**changes: Any) -> pb.Space:
    fields = {"shape": [2], "dtype": DType.DTYPE_FLOAT32, "low": [0], "high": [1]} | changes
    return pb.Space(box=pb.BoxSpace(**fields))


def discrete(**fields: Any) -> pb.Space:
    return pb.Space(discrete=pb.DiscreteSpace(**({"dtype": DType.DTYPE_INT64, "n": 2} | fields)))


def multi_discrete(**changes: Any) -> pb.Space:
    fields = {"shape": [2], "nvec": [2, 3], "dtype": DType.DTYPE_INT8} | changes
    return pb.Space(multi_discrete=pb.MultiDiscreteSpace(**fields))


def nested(depth: int) -> pb.Space:
    space = discrete()
    for _ in range(depth - 1):
        space = pb.Space(tuple=pb.TupleSpace(spaces=[space]))
    return space


U8: dict[str, Any] = {"dtype": DType.DTYPE_UINT8, "low": [], "high": []}
ENTRY = pb.DictSpace.Entry(key="a", space=discrete())
BAD_SPACES: list[tuple[str, pb.Space]] = [
    ("no kind", pb.Space()),
    ("no kind", pb.Space(sequence=pb.SequenceSpace())),
    ("no dtype is given", box(dtype=0)),
    ("dtype number 99", box(dtype=99)),
    ("cannot have the dtype bfloat16", box(dtype=DType.DTYPE_BFLOAT16)),
    ("cannot have the dtype float32", discrete(dtype=DType.DTYPE_FLOAT32)),
    ("has 0 low bounds", box(low=[])),
    ("has 3 high bounds", box(high=[1, 2, 3])),
    ("has 2 low bounds", box(int_low=[0])),
    ("above", box(low=[0, 3], high=[1, 2])),
    ("not a number", box(low=[0, np.nan])),
    ("beyond that dtype", box(high=[1e39])),
    ("beyond its dtype", box(**U8, int_low=[0], int_high=[256])),
    ("beyond its dtype", box(**U8, int_low=[-1], int_high=[25])),
    ("the bound 0.5", box(**(U8 | {"low": [0.5]}), int_high=[25])),
    ("infinite", box(**(U8 | {"high": [np.inf]}), int_low=[0])),
    ("the bound inf", box(**(U8 | {"low": [np.inf]}), int_high=[0])),
    ("over the limit", box(shape=[1 << 26])),
    ("over the limit", box(shape=[2**64 - 1, 2**64 - 1])),
    ("over the limit", box(shape=[1] * 17)),
    ("is not valid", box(shape=[0, 2**64 - 1])),
    ("at least one", discrete(n=0)),
    ("at least one", discrete(n=-1)),
    ("beyond its dtype", discrete(n=2, start=2**63 - 1)),
    ("beyond its dtype", discrete(n=128, dtype=DType.DTYPE_INT8)),
    ("has 1 counts", multi_discrete(nvec=[2])),
    ("has 2 counts", multi_discrete(start=[1])),
    ("not positive", multi_discrete(nvec=[2, 0])),
    ("beyond its dtype", multi_discrete(nvec=[2, 300])),
    ("is not valid", pb.Space(multi_binary=pb.MultiBinarySpace(shape=[2, 0]))),
    ("over the limit", pb.Space(multi_binary=pb.MultiBinarySpace(shape=[1 << 26]))),
    ("key twice", pb.Space(dict=pb.DictSpace(entries=[ENTRY, ENTRY]))),
    ("is not valid", pb.Space(text=pb.TextSpace(min_length=3, max_length=2, characters="a"))),
    ("over the limit", pb.Space(text=pb.TextSpace(max_length=1 << 60, characters="a"))),
    ("16 deep", nested(17)),
    ("4096 spaces", pb.Space(tuple=pb.TupleSpace(spaces=[discrete()] * 4096))),
]


@pytest.mark.parametrize(("complaint", "message"), BAD_SPACES)
def test_a_message_of_no_space_is_refused(complaint: str, message: pb.Space) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=complaint):
            space_from_message(message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_spaces_up_to_the_limit_of_depth_arrive() -> None:
    deepest = space_from_message(nested(wire_spaces.MAX_DEPTH))
    assert travel(deepest) == deepest


# Gymnasium's spaces as trees.


BOX = spaces.Box(-1, 1, (2, 3), np.float32)
COUNT = spaces.Discrete(4, start=-2)
CHOICES = spaces.MultiDiscrete([2, 3], start=[5, 6])
BITS = spaces.MultiBinary((2, 2))
NESTED = spaces.Dict(
    {"a": BOX, "b": spaces.Tuple([COUNT, spaces.Dict({"c": CHOICES})]), "d": spaces.Tuple([BITS])}
)
LEAVES = [(("a",), BOX), (("b", "0"), COUNT), (("b", "1", "c"), CHOICES), (("d", "0"), BITS)]


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
