"""one_hot and flatten."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from juggler.runtime.connectors.encoding import Flatten, OneHot
from juggler.runtime.wire.choices import OutsideSpace
from juggler.runtime.wire.structures import tree_map, zeros

ACTED = spaces.Discrete(2)
TREE = spaces.Dict(
    {
        "a": spaces.Discrete(3, start=2),
        "b": spaces.Box(0, 255, (2, 1), np.uint8),
        "c": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]),
    }
)


def observations() -> dict:
    return {
        "a": np.array([2, 4]),
        "b": np.array([[[7], [8]], [[9], [10]]], np.uint8),
        "c": {"0": np.array([[1, 0], [0, 2]]), "1": np.array([[1, 1], [0, 1]], np.int8)},
    }


def test_choices_become_ones_among_zeros() -> None:
    one_hot = OneHot(TREE, ACTED)
    result = one_hot(observations())
    assert result["a"].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert result["c"]["0"].tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    assert result["b"].dtype == np.uint8
    assert one_hot.observation_space["a"] == spaces.Box(0, 1, (3,), np.float32)
    assert one_hot.observation_space["c"][0] == spaces.Box(0, 1, (5,), np.float32)
    assert one_hot.observation_space["c"][1] == TREE["c"][1]


def test_a_single_choice_needs_no_tree() -> None:
    assert OneHot(spaces.Discrete(2), ACTED)(np.array([1])).tolist() == [[0, 1]]


def test_choices_of_an_action_mask_are_not_for_encoding() -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "action_mask": spaces.MultiDiscrete([2, 2])})
    one_hot = OneHot(space, ACTED)
    assert one_hot.observation_space["action_mask"] == space["action_mask"]
    with pytest.raises(ValueError, match="MultiDiscrete"):
        OneHot(spaces.Dict({"action_mask": spaces.MultiDiscrete([2, 2])}), ACTED)


def test_everything_becomes_one_vector_in_the_order_of_the_space() -> None:
    flatten = Flatten(TREE, ACTED)
    expected = [
        [1, 0, 0, 7, 8, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 1, 9, 10, 1, 0, 0, 0, 1, 0, 1],
    ]
    result = flatten(observations())
    assert result.tolist() == expected
    assert result.dtype == np.float32
    space = flatten.observation_space
    assert space.shape == (12,)
    assert space.low.tolist() == [0] * 12
    assert space.high.tolist() == [1, 1, 1, 255, 255, 1, 1, 1, 1, 1, 1, 1]


def test_an_action_mask_stays_beside_the_vector() -> None:
    mask = spaces.Box(0, 1, (3,), np.int8)
    flatten = Flatten(spaces.Dict({"x": spaces.Discrete(2), "action_mask": mask}), ACTED)
    result = flatten({"x": np.array([1]), "action_mask": np.array([[1, 0, 1]], np.int8)})
    assert result["observation"].tolist() == [[0, 1]]
    assert result["action_mask"].tolist() == [[1, 0, 1]]
    assert flatten.observation_space["action_mask"] == mask
    assert flatten.observation_space["observation"].shape == (2,)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(4), 7),
        (spaces.Discrete(4), -1),
        (spaces.Discrete(4, start=10), 9),
        (spaces.MultiDiscrete([3, 3]), [3, 0]),
        (spaces.MultiDiscrete([3, 3]), [0, -1]),
        (spaces.MultiBinary(2), [2, 0]),
    ],
)
@pytest.mark.parametrize("kind", [OneHot, Flatten])
def test_a_value_outside_its_space_is_not_taken_as_another_one(kind, space, value) -> None:
    if kind is OneHot and isinstance(space, spaces.MultiBinary):
        return
    connector, inside = kind(space, spaces.Discrete(2)), space.sample()
    with pytest.raises(OutsideSpace, match=r"which is not in its space \w+\(") as caught:
        connector(np.array([inside, value]))
    assert caught.value.row == 1


def test_an_action_mask_alone_cannot_be_flattened() -> None:
    with pytest.raises(ValueError, match="nothing to do"):
        Flatten(spaces.Dict({"action_mask": spaces.MultiBinary(2)}), spaces.Discrete(2))


@given(st.integers(0, 3), st.integers(0, 1 << 20))
def test_what_is_observed_lies_within_the_new_space(rows, seed) -> None:
    TREE.seed(seed)
    samples = [TREE.sample() for _ in range(rows)]
    batch = zeros(TREE, (rows,))
    for i, sample in enumerate(samples):
        batch["a"][i], batch["b"][i] = sample["a"], sample["b"]
        batch["c"]["0"][i], batch["c"]["1"][i] = sample["c"]
    before = tree_map(np.copy, batch)
    flatten, one_hot = Flatten(TREE, ACTED), OneHot(TREE, ACTED)
    for vector in flatten(batch):
        assert flatten.observation_space.contains(vector)
    encoded = one_hot(batch)
    for row in encoded["a"]:
        assert one_hot.observation_space["a"].contains(row)
        assert row.sum() == 1
    tree_map(np.testing.assert_array_equal, batch, before)
