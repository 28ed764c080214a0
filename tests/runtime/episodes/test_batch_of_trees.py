"""EpisodeBatch, where observations, actions and states are trees of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.random_episodes import columns

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.errors import WireError


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
            "'last_observations/row' must be",
        ),
        (
            {"final_observations": {"row": np.zeros((2, 1), np.float32), "more": {}}},
            "column 'final_observations/more'",
        ),
        ({"states": np.zeros(4)}, "column 'states' must be a branch"),
        ({"states": {"module": {"h": np.zeros((3, 8))}}}, "'states/module/h' has shape"),
        ({"states": {"module": np.zeros(())}}, "'states/module' has shape ()"),
    ],
)
def test_what_is_wrong_within_a_tree_is_named(changed: dict[str, Any], message: str) -> None:
    assert message in _tree_refusal(**changed)
