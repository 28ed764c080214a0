"""A batch of episodes from columns that somebody has put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.random_episodes import columns

from juggler.runtime.episodes.batch import EpisodeBatch, batch_of_columns
from juggler.runtime.wire.errors import WireError

SEGMENTS = ("segment_rows", "segment_starts", "segment_lengths", "segment_offsets")


def without(*names: str, **changed: Any) -> dict[str, Any]:
    return {name: x for name, x in columns(**changed).items() if name not in names}


def test_they_are_the_batch_that_they_were_taken_from() -> None:
    batch = EpisodeBatch.from_tree(columns())
    found = batch_of_columns({**columns(), "of my own": np.zeros(3)})
    for name, column in batch.to_tree().items():
        np.testing.assert_array_equal(getattr(found, name), column, err_msg=name)


def test_segments_follow_from_where_episodes_end() -> None:
    # Row 3 is one stretch: that the weights changed in its middle is in the labels alone.
    found = batch_of_columns(without(*SEGMENTS, "states"))
    assert found.segment_rows.tolist() == [0, 0, 1, 2, 3]
    assert found.segment_starts.tolist() == [0, 2, 0, 0, 0]
    assert found.segment_lengths.tolist() == [2, 2, 3, 4, 4]


def test_where_nothing_is_truncated_final_observations_may_be_left_out() -> None:
    nothing = np.zeros((4, 4), np.bool_)
    finals = ("final_observations", "final_rows", "final_steps")
    found = batch_of_columns(without(*finals, *SEGMENTS, truncated=nothing))
    assert found.final_observations.shape == (0, 2)  # type: ignore[union-attr]
    with pytest.raises(WireError, match="truncated"):
        batch_of_columns(without(*finals))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (without("live"), "there is no column 'live': bool"),
        (without("final_rows"), "no column 'final_rows', which goes with"),
        (without("segment_offsets"), "no column 'segment_offsets'"),
        (columns(rewards=np.zeros((4, 4))), "'rewards'? must be float32, not float64"),
        (columns(action_logp=np.zeros((4, 3), np.float32)), r"action_logp.* \(4, 3\), expected"),
        (columns(actions=np.zeros(4)), r"actions.* has shape \(4,\)"),
        (columns(final_rows=np.zeros(2, np.float32)), "'final_rows' must be an array of integers"),
        (columns(final_steps=np.array([1, -3])), "'final_steps' holds an index that"),
        (without(*SEGMENTS, live=np.ones((4, 4))), r"'live' must be bool \[N, T\]"),
        (without(*SEGMENTS, truncated=np.ones((4, 3), bool)), r"'truncated' has shape \(4, 3\)"),
        ({}, "there is no column"),
        ([columns()], "columns must be by name, not a list"),
    ],
)
def test_what_does_not_fit_is_named_with_what_is_expected(given: Any, words: str) -> None:
    with pytest.raises(WireError, match=f"left: .*{words}") as wrong:
        batch_of_columns(given, "left")
    assert "\n" not in str(wrong.value)


def test_a_module_with_a_state_needs_its_segments() -> None:
    states = {"module": {"h": np.zeros((4, 2), np.float32)}}
    for keys, given in (
        ({"remembers": True}, without(*SEGMENTS)),
        ({}, without(*SEGMENTS, states=states)),
    ):
        with pytest.raises(WireError, match="segments"):
            batch_of_columns(given, **keys)
