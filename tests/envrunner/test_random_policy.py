"""Actions at random are uniform among the legal ones, and repeat with their seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.envrunner.paced.random_policy import RandomActions, RandomPolicy
from juggler.runtime.wire.structures import from_tree

SPACES: list[spaces.Space[Any]] = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Box(-np.inf, np.inf, (1,), np.float32),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,), np.float32)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_action_is_one_of_the_space_and_repeats_with_the_seed(
    space: spaces.Space[Any],
) -> None:
    drawn, again = (RandomActions(space, 4).draw(20, None) for _ in range(2))
    np.testing.assert_equal(drawn, again)
    for k in range(20):
        one = {"a": drawn["a"][k], "b": drawn["b"][k]} if isinstance(drawn, dict) else drawn[k]  # type: ignore[index]
        assert space.contains(from_tree(space, one))
    actions = RandomActions(space, 5)
    with pytest.raises(AssertionError):
        np.testing.assert_equal(actions.draw(20, None), drawn)
    actions.seed(4)
    np.testing.assert_equal(actions.draw(20, None), drawn)


def test_choices_are_uniform() -> None:
    drawn: Any = RandomActions(spaces.Discrete(3, start=5), 0).draw(30_000, None)
    assert np.abs(np.bincount(drawn)[5:] / 30_000 - 1 / 3).max() < 0.01


def test_only_legal_actions_are_drawn_and_these_uniformly() -> None:
    masks = np.tile(np.array([[0, 1, 1], [1, 0, 0]], np.int8), (10_000, 1))  # [B, 3]
    seen = {"observation": np.zeros((20_000, 2), np.float32), "action_mask": masks}
    drawn: Any = RandomActions(spaces.Discrete(3), 0).draw(20_000, seen)
    assert masks[np.arange(20_000), drawn].all()
    assert set(drawn[1::2]) == {0}
    assert abs((drawn[::2] == 1).mean() - 0.5) < 0.02


def test_the_policy_draws_in_evaluations_too() -> None:
    policy = RandomPolicy(spaces.Discrete(3), 0)
    places, first = np.arange(300), np.ones(300, np.bool_)
    assert set(policy.act_deterministically(None, places, first)) == {0, 1, 2}
    sent, chosen, inputs = policy.act(None, places, first)
    np.testing.assert_array_equal(sent, chosen)
    assert inputs.shape == (300, *policy.blank_inputs.shape)
