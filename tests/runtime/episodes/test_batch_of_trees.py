"""EpisodeBatch, where observations, actions and states are trees of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.episode_columns import columns

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import episodes_pb2


def _tree_columns(**changed: Any) -> dict[str, Any]:
    """The usual batch with its observations [r, t] in a Dict and a Tuple, and a state."""
    return {
        **columns(),
        **{name: _split(columns()[name]) for name in columns() if name.endswith("observations")},
        "actions": {"0": columns()["actions"]},
        "states": {"module": {"h": np.ones((4, 8), np.float32)}, "connectors": {"stack": {}}},
        **changed,
    }


def _split(array: Any) -> dict[str, Any]:
    return {"row": array[..., 0], "more": {"0": array[..., 1:]}}


def _tree_refusal(**changed: Any) -> str:
    with pytest.raises(WireError) as refused:
        EpisodeBatch.from_tree(_tree_columns(**changed))
    return str(refused.value)


def test_a_batch_of_trees_comes_back_from_the_wire() -> None:
    tree = EpisodeBatch.from_tree(_tree_columns()).to_tree()
    (chunk,) = encode_frame(episodes_pb2.BatchHeader(), tree)
    frame = FrameReader(episodes_pb2.BatchHeader).feed(chunk)
    assert frame is not None
    found = EpisodeBatch.from_tree(frame.tree).to_tree()
    assert found["states"]["connectors"] == {"stack": {}}  # type: ignore[call-overload,index]
    expected = flatten(_tree_columns())
    assert [path for path, _ in flatten(found)] == [path for path, _ in flatten(tree)]
    arrays = dict(flatten(found))
    for path, array in expected:
        np.testing.assert_array_equal(arrays[path], array)


def test_episodes_of_trees_are_views_of_every_array() -> None:
    batch = EpisodeBatch.from_tree(_tree_columns())
    plain = EpisodeBatch.from_tree(columns())
    for tree, array in zip(batch.episodes(), plain.episodes(), strict=True):
        for ours, expected in (
            (tree.observations, array.observations),
            (tree.last_observation, array.last_observation),
        ):
            assert isinstance(ours, dict)
            np.testing.assert_array_equal(ours["row"], expected[..., 0])
            np.testing.assert_array_equal(ours["more"]["0"], expected[..., 1:])
        np.testing.assert_array_equal(tree.actions["0"], array.actions)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"observations": {}}, "column 'observations' holds no array"),
        ({"actions": {"0": columns()["actions"], "1": {}}}, "column 'actions/1' holds no array"),
        ({"actions": {"0": columns()["actions"][:, :3]}}, "'actions/0' has shape (4, 3)"),
        ({"last_observations": {"row": np.zeros(4, np.float32)}}, "has an array at 'more/0'"),
        ({"final_observations": np.zeros((2, 2), np.float32)}, "has an array at the root"),
        (
            {"last_observations": _split(columns()["last_observations"].astype(np.float64))},
            "'last_observations/row' must be float32, not float64",
        ),
        (
            {"final_observations": {"row": np.zeros((2, 1), np.float32), "more": {}}},
            "column 'final_observations/more' holds no array",
        ),
        ({"states": np.zeros(4)}, "column 'states' must be a branch"),
        (
            {"states": {"module": {"h": np.zeros((3, 8))}}},
            "'states/module/h' has shape (3, 8), expected (4, ...)",
        ),
        ({"states": {"module": np.zeros(())}}, "'states/module' has shape ()"),
    ],
)
def test_what_is_wrong_within_a_tree_is_named(changed: dict[str, Any], message: str) -> None:
    assert message in _tree_refusal(**changed)
