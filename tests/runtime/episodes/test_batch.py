"""EpisodeBatch, from the network and from columns, and versions of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.episode_views import episodes_of
from support.random_episodes import FIRST_HALF, SECOND_HALF, column_with, columns

from juggler.runtime.episodes.batch import EpisodeBatch, batch_of_columns
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.errors import WireError

NAMES = sorted(columns())
TREES = {"observations", "actions", "last_observations", "final_observations", "states"}
WITH_A_DTYPE = sorted(set(NAMES) - {"observations", "actions", "states"})
#: Those whose own length the others are measured by.
MEASURES = {"rewards": "observations", "final_rows": "final_steps", "segment_rows": "segment_"}


def _refusal(**changed: Any) -> str:
    with pytest.raises(WireError) as refused:
        EpisodeBatch.from_tree(columns(**changed))
    return str(refused.value)


def test_a_batch_comes_back_from_its_own_tree_without_a_copy() -> None:
    batch = EpisodeBatch.from_tree(columns())
    again = EpisodeBatch.from_tree(batch.to_tree())
    for name in NAMES:
        assert getattr(again, name) is getattr(batch, name)
    assert (batch.rows, batch.steps, batch.live_steps) == (4, 4, 15)


def test_a_batch_without_an_end_and_without_a_segment_is_a_batch() -> None:
    empty = {name: c[:0] for name, c in columns().items() if name[:6] in ("final_", "segmen")}
    dead = dict.fromkeys(("live", "terminated", "truncated"), np.zeros((4, 4), np.bool_))
    batch = EpisodeBatch.from_tree(columns(**empty, **dead))
    assert list(episodes_of(batch)) == []


@pytest.mark.parametrize("tree", [np.zeros(3), "columns", None, [1]])
def test_something_else_than_a_branch_of_columns_is_refused(tree: Any) -> None:
    with pytest.raises(WireError, match="branch"):
        EpisodeBatch.from_tree(tree)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_column_is_named(name: str) -> None:
    tree = columns()
    del tree[name]
    with pytest.raises(WireError, match=rf"has no columns \['{name}'\]"):
        EpisodeBatch.from_tree(tree)


def test_an_unknown_column_is_named() -> None:
    assert "unknown columns ['values']" in _refusal(values=np.zeros((4, 4), np.float32))


@pytest.mark.parametrize("name", sorted(set(NAMES) - TREES))
def test_a_branch_in_place_of_a_column_is_named(name: str) -> None:
    assert f"column '{name}' must be an array" in _refusal(**{name: {"x": columns()[name]}})


@pytest.mark.parametrize("name", WITH_A_DTYPE)
def test_a_column_of_the_wrong_dtype_is_named(name: str) -> None:
    column = columns()[name]
    for dtype in ("float64", "int64", "uint8"):
        assert f"column '{name}' must be {column.dtype}, not {dtype}" in _refusal(
            **{name: column.astype(dtype)}
        )


def test_bootstrap_observations_must_have_the_dtype_of_observations() -> None:
    wide = columns()["observations"].astype(np.float64)
    said = "'last_observations' must be float64, not float32, as 'observations' are"
    assert said in _refusal(observations=wide)


@pytest.mark.parametrize("name", sorted(set(NAMES) - MEASURES.keys() - {"states"}))
def test_a_column_that_is_too_short_or_too_long_is_named(name: str) -> None:
    column = columns()[name]
    others = [column[:-1], np.concatenate([column, column[:1]])]
    if name.startswith(("final_", "segment_")):
        others.append(column[..., None])  # a dimension too many
    for other in others:
        assert f"column '{name}' has shape {other.shape}" in _refusal(**{name: other})


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_a_column_that_others_are_measured_by_must_agree_with_them(name: str) -> None:
    column = columns()[name]
    for other in (column[:-1], np.concatenate([column, column[:1]])):
        assert f"column '{MEASURES[name]}" in _refusal(**{name: other})


@pytest.mark.parametrize("shape", [(), (16,), (2, 2, 4)])
def test_rewards_must_be_over_rows_and_steps(shape: tuple[int, ...]) -> None:
    rewards = np.zeros(shape, np.float32)
    assert f"rewards must have shape [N, T], not {shape}" in _refusal(rewards=rewards)


def test_a_batch_of_no_steps_is_refused() -> None:
    assert "a batch of 4 rows and 0 steps holds" in _refusal(rewards=np.zeros((4, 0), np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_rows", 4),
        ("final_rows", -1),
        ("final_steps", 4),
        ("final_steps", -1),
        ("segment_rows", 4),
        ("segment_rows", -1),
        ("segment_starts", 4),
        ("segment_starts", -1),
        ("segment_lengths", 5),
        ("segment_lengths", -1),
    ],
)
def test_an_index_out_of_range_is_named(name: str, value: int) -> None:
    assert f"column '{name}' holds an index outside" in _refusal(**column_with(name, (0,), value))


@pytest.mark.parametrize("name", ["segment_starts", "segment_lengths"])
def test_a_segment_that_goes_beyond_its_row_is_refused(name: str) -> None:
    said = _refusal(**column_with(name, (1,), 3))
    assert "column 'segment_starts + segment_lengths' holds an index outside 0..4" in said


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("segment_lengths", (0,), 1),  # a live step that is in none
        ("segment_starts", (1,), 1),  # one that is in two
        ("segment_lengths", (2,), 4),  # a step that is not live
        ("live", (3, 3), False),
    ],
)
def test_segments_that_do_not_cover_each_live_step_once_are_refused(
    name: str, at: tuple[int, ...], value: int
) -> None:
    assert "cover each live step exactly once" in _refusal(**column_with(name, at, value))


def test_an_episode_that_ends_within_a_segment_is_refused() -> None:
    assert "ends within a segment" in _refusal(**column_with("terminated", (0, 0), True))


@pytest.mark.parametrize(("name", "value"), [("segment_episodes", 16), ("segment_offsets", 0)])
def test_an_episode_that_breaks_off_before_another_in_its_row_is_refused(
    name: str, value: int
) -> None:
    """Returns would flow from one to the other."""
    said = _refusal(**column_with(name, (SECOND_HALF,), value))
    assert "in mid-row without an end of its episode, and another episode follows at once" in said


def test_an_episode_may_break_off_at_the_end_of_a_row_or_before_a_step_that_is_not_live() -> None:
    live = column_with("live", (3, 1), False)
    lengths = column_with("segment_lengths", (FIRST_HALF,), 1)
    episodes = column_with("segment_episodes", (SECOND_HALF,), 16)
    EpisodeBatch.from_tree(columns(**live, **lengths, **episodes))


def test_a_final_observation_of_a_step_that_is_not_truncated_is_refused() -> None:
    assert "not truncated" in _refusal(**column_with("final_steps", (0,), 0))
    assert "not truncated" in _refusal(**column_with("truncated", (2, 3), False))


def test_a_truncated_step_without_its_final_observation_is_refused() -> None:
    assert "has no final observation" in _refusal(**column_with("truncated", (1, 1), True))
    without = {name: columns()[name][:1] for name in columns() if name.startswith("final_")}
    assert "has no final observation" in _refusal(**without)
    # Two of one step do not stand for two steps.
    twice = {"final_rows": np.array([0, 0], np.int32), "final_steps": np.array([1, 1], np.int32)}
    assert "has no final observation" in _refusal(**twice)


def test_a_segment_that_began_before_its_episode_is_refused() -> None:
    assert "segment_offsets" in _refusal(**column_with("segment_offsets", (0,), -1))


# EpisodeBatch, where observations, actions and states are trees of arrays.


def _tree_columns(**changed: Any) -> dict[str, Any]:
    """The usual batch, with trees of observations [r, t] and a state."""
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


# A batch of episodes from columns of another source.


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


# Versions of weights.


def test_the_version_of_a_run_grows_though_a_module_goes_back_to_an_earlier_update() -> None:
    before = Version.of_run([Version(1, 50), Version(1, 90)])
    after = Version.of_run([Version(1, 50), Version(2, 40)])
    assert before == Version(2, 140)
    assert after == Version(3, 90)
    assert before < after
    assert Version.of_run([Version(3, 7)]) == Version(3, 7)
