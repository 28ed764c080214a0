"""clip_actions and rescale_actions, and the pipeline that they stand in."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.encoding import ClipActions, RescaleActions
from juggler.runtime.connectors.pipelines import build_module_to_env

OBSERVED = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))


def pipeline(action_space, *pieces):
    config = ConnectorsConfig(module_to_env=list(pieces))
    return build_module_to_env(config, OBSERVED, action_space)


def test_actions_beyond_the_bounds_become_the_bounds() -> None:
    actions = np.array([[-3, 5], [1, 11]], np.float32)
    assert ClipActions(OBSERVED, BOX)(actions).tolist() == [[-2, 5], [1, 10]]
    assert actions.tolist() == [[-3, 5], [1, 11]]


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(3), spaces.MultiBinary(2), spaces.Box(-np.inf, np.inf, (2,), np.float32)],
)
def test_where_nothing_is_bounded_the_default_pipeline_is_empty(space) -> None:
    assert ClipActions(OBSERVED, space).idle
    actions = np.array([1])
    assert pipeline(space)(actions) is actions
    assert pipeline(space).action_space == space


@given(
    arrays.arrays(np.float64, (3,), elements=st.floats(-1e6, 1e6)),
    arrays.arrays(np.float64, (3,), elements=st.floats(0.001, 1e6)),
    arrays.arrays(np.float32, (2, 3), elements=st.floats(-3, 3, width=32)),
    st.sampled_from([np.float32, np.float64]),
)
def test_rescaled_actions_lie_where_the_policy_put_them_between_the_bounds(
    low, width, actions, dtype
) -> None:
    low, high = low.astype(dtype), (low + width).astype(dtype)
    space = spaces.Box(low, high, dtype=dtype)
    rescale = RescaleActions(OBSERVED, space)
    assert rescale.action_space == spaces.Box(-1, 1, (3,), dtype)
    sent = rescale(actions)
    exact = low.astype(np.float64), high.astype(np.float64), actions.astype(np.float64)
    expected = exact[0] + (np.clip(exact[2], -1, 1) + 1) / 2 * (exact[1] - exact[0])
    tolerance = 1e-5 if dtype is np.float32 else 1e-9
    np.testing.assert_allclose(sent, expected, rtol=tolerance, atol=tolerance * 1e6)
    for action in sent:
        assert space.contains(action)


def test_numbers_without_two_finite_bounds_are_not_rescaled() -> None:
    low, high = np.array([-np.inf, 0, 2]), np.array([1, np.inf, 4])
    space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
    rescale = RescaleActions(OBSERVED, space)
    assert rescale.action_space.low.tolist() == [-np.inf, 0, -1]
    assert rescale.action_space.high.tolist() == [1, np.inf, 1]
    assert rescale(np.array([[-7, 7, 0.5], [3, -3, 0]])).tolist() == [[-7, 7, 3.5], [1, 0, 3]]


def test_the_policy_acts_in_what_the_first_piece_takes() -> None:
    for pieces in (["rescale_actions"], [{"use": "rescale_actions", "first": True}]):
        built = pipeline(BOX, *pieces)
        assert built.action_space == spaces.Box(-1, 1, (2,), np.float32)
        assert built(np.array([[9, 0], [-9, 1]], np.float32)).tolist() == [[2, 5], [-2, 10]]


def test_trees_of_actions_are_clipped_and_rescaled_leaf_by_leaf() -> None:
    space = spaces.Dict({"push": BOX, "turn": spaces.Tuple([spaces.Discrete(3), BOX])})
    built = pipeline(space, "rescale_actions")
    assert built.action_space["push"] == built.action_space["turn"][1]
    turn = np.array([2])
    sent = built({"push": np.array([[3.0, 0]]), "turn": {"0": turn, "1": np.array([[0, -4.0]])}})
    assert sent["push"].tolist() == [[2, 5]]
    assert sent["turn"][0] is turn  # as Gymnasium has it
    assert sent["turn"][1].tolist() == [[0, 0]]


@pytest.mark.parametrize("clip", [True, False])
def test_the_environment_gets_actions_in_its_own_dtypes(clip: bool) -> None:
    space = spaces.Dict(
        {
            "many": spaces.MultiDiscrete([3, 2], np.uint8),
            "free": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "half": spaces.Box(-1, 1, (), np.float16),
            "bits": spaces.MultiBinary(2),
        }
    )
    config = ConnectorsConfig(module_to_env=[] if clip else [{"remove": "clip_actions"}])
    pipeline = build_module_to_env(config, spaces.Discrete(2), space)
    chosen = {
        "many": np.array([[2, 1]]),
        "free": np.array([[0.5, 1]], np.float32),
        "half": np.array([0.25], np.float32),
        "bits": np.array([[1, 0]], np.int8),
    }
    given = pipeline(chosen)
    assert space.contains({key: array[0] for key, array in given.items()})
    assert not build_module_to_env(config, spaces.Discrete(2), space["many"]).idle
    assert chosen["many"].dtype == np.int64
