"""Observations of a group fit the group's space, whatever its structure, with masks or without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.multi_agent.group_observations import GroupObservations, Misfit
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.runtime.wire.structures import from_tree, space_leaves, tree_map
from juggler.runtime.wire.trees import flatten

PLAIN: dict[str, spaces.Space[Any]] = {
    "Box": spaces.Box(-1, 1, (2, 3)),
    "Discrete": spaces.Discrete(5, start=2),
    "Dict": spaces.Dict({"image": spaces.Box(0, 255, (4,), np.uint8), "on": spaces.Discrete(2)}),
    "Tuple": spaces.Tuple([spaces.MultiBinary(3), spaces.Box(-1, 1, (1,))]),
}
ACTIONS: dict[str, tuple[spaces.Space[Any], Any]] = {
    "no mask": (spaces.Box(-1, 1, (2,)), None),
    "Discrete": (spaces.Discrete(3), np.array([1, 0, 1])),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), (np.array([1, 0]), np.array([0, 1, 1]))),
    "Dict": (
        spaces.Dict({"move": spaces.Discrete(2), "aim": spaces.Box(-1, 1, (1,))}),
        {"move": np.array([True, False])},
    ),
}


@pytest.mark.parametrize("observations", PLAIN)
@pytest.mark.parametrize("actions", ACTIONS)
def test_each_row_of_a_batch_is_in_the_space_of_the_group(observations: str, actions: str) -> None:
    space, (action_space, mask) = PLAIN[observations], ACTIONS[actions]
    space.seed(0)
    made = GroupObservations(AgentGroup(("a", "b"), space, action_space), mask)
    seen = [space.sample() for _ in range(3)]
    batch = made.batch(seen, [mask, mask, mask])
    whole = made.group.observation_space
    arrays, nothing = dict(flatten(batch)), dict(flatten(made.batch([], [])))
    assert arrays.keys() == nothing.keys() == dict(space_leaves(whole)).keys()
    for row in range(3):
        one = from_tree(whole, tree_map(lambda array, row=row: array[row], batch))
        assert whole.contains(one)
    for path, array in arrays.items():
        assert nothing[path].shape == (0, *array.shape[1:]), path
        assert nothing[path].dtype == array.dtype


def test_last_observations_without_a_mask_allow_everything() -> None:
    made = GroupObservations(
        AgentGroup(("a",), PLAIN["Box"], spaces.Discrete(3)), np.array([1, 0, 1])
    )
    batch = made.batch([np.zeros((2, 3))] * 2, [None, np.array([0, 0, 1])], last=True)
    assert isinstance(batch, dict)
    assert batch["action_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_mask_of_floats_is_one_and_must_be_binary() -> None:
    group = AgentGroup(("a",), PLAIN["Box"], spaces.Discrete(3))
    made = GroupObservations(group, np.array([0.0, 1.0, 1.0]))
    batch = made.batch([np.zeros((2, 3))], [np.array([0.0, 0.0, 1.0])])
    assert isinstance(batch, dict)
    assert made.group.observation_space.contains(tree_map(lambda array: array[0], batch))
    assert batch["action_mask"].tolist() == [[0, 0, 1]]
    with pytest.raises(Misfit, match=r"other numbers than 0 and 1: 0\.5"):
        made.batch([np.zeros((2, 3))], [np.array([0.0, 0.5, 1.0])])


def test_a_mask_that_was_not_there_at_first_is_an_error() -> None:
    made = GroupObservations(AgentGroup(("a",), PLAIN["Box"], spaces.Discrete(3)), None)
    with pytest.raises(Misfit, match="had none in the first reset") as wrong:
        made.batch([np.zeros((2, 3))] * 2, [None, np.ones(3)])
    assert wrong.value.row == 1


def test_a_mask_beside_one_in_the_observation_is_not_read() -> None:
    space = spaces.Dict({"observation": PLAIN["Box"], "action_mask": spaces.MultiBinary(3)})
    made = GroupObservations(AgentGroup(("a",), space, spaces.Discrete(3)), np.ones(3))
    seen = {"observation": np.zeros((2, 3)), "action_mask": np.array([1, 0, 0])}
    batch = made.batch([seen], [np.ones(3)])
    assert made.group.observation_space is space
    assert isinstance(batch, dict)
    assert batch["action_mask"].tolist() == [[1, 0, 0]]
