"""EpisodeBatch: what a tree from the network must be, and the views of its episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from episode_columns import (
    FIRST_HALF,
    RUNNING,
    SECOND_HALF,
    TERMINATED,
    TRUNCATED_AT_THE_END,
    TRUNCATED_IN_MID_ROW,
    columns,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import episodes_pb2

NAMES = sorted(columns())
TREES = {"observations", "actions", "last_observations", "final_observations", "states"}
WITH_A_DTYPE = sorted(set(NAMES) - {"observations", "actions", "states"})
#: Those whose own length the others are measured by.
MEASURES = {"rewards": "observations", "final_rows": "final_steps", "segment_rows": "segment_"}


def _refusal(**changed: Any) -> str:
    with pytest.raises(WireError) as refused:
        EpisodeBatch.from_tree(columns(**changed))
    return str(refused.value)


def _changed(name: str, at: tuple[int, ...], value: Any) -> dict[str, Any]:
    column = columns()[name]
    column[at] = value
    return {name: column}


# -- trees ----------------------------------------------------------------------------------------


def test_a_batch_comes_back_from_its_own_tree_without_a_copy() -> None:
    batch = EpisodeBatch.from_tree(columns())
    again = EpisodeBatch.from_tree(batch.to_tree())
    for name in NAMES:
        assert getattr(again, name) is getattr(batch, name)
    assert (batch.rows, batch.steps, batch.live_steps) == (4, 4, 15)


def test_a_batch_comes_back_from_the_wire() -> None:
    (chunk,) = encode_frame(episodes_pb2.BatchHeader(), EpisodeBatch.from_tree(columns()).to_tree())
    frame = FrameReader(episodes_pb2.BatchHeader).feed(chunk)
    assert frame is not None
    found = EpisodeBatch.from_tree(frame.tree)
    for name, column in columns().items():
        np.testing.assert_array_equal(getattr(found, name), column)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_observations_and_actions_may_have_any_shape_and_dtype(
    shape: tuple[int, ...], dtype: type
) -> None:
    batch = EpisodeBatch.from_tree(
        columns(
            observations=np.zeros((4, 4, *shape), dtype),
            last_observations=np.zeros((4, *shape), dtype),
            final_observations=np.zeros((2, *shape), dtype),
            actions=np.zeros((4, 4, *shape), dtype),
        )
    )
    assert batch.observations.shape == (4, 4, *shape)


def test_a_batch_without_an_end_and_without_a_segment_is_a_batch() -> None:
    empty = {name: c[:0] for name, c in columns().items() if name[:6] in ("final_", "segmen")}
    dead = dict.fromkeys(("live", "terminated", "truncated"), np.zeros((4, 4), np.bool_))
    batch = EpisodeBatch.from_tree(columns(**empty, **dead))
    assert list(batch.episodes()) == []


@pytest.mark.parametrize("tree", [np.zeros(3), "columns", None, [1]])
def test_something_else_than_a_branch_of_columns_is_refused(tree: Any) -> None:
    with pytest.raises(WireError, match="must be a branch of columns"):
        EpisodeBatch.from_tree(tree)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_column_is_named(name: str) -> None:
    tree = columns()
    del tree[name]
    with pytest.raises(WireError, match=rf"lacks the columns \['{name}'\]"):
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
    assert "'last_observations' must be float64, not float32" in _refusal(observations=wide)


@pytest.mark.parametrize("name", sorted(set(NAMES) - MEASURES.keys() - {"states"}))
def test_a_column_that_is_too_short_or_too_long_is_named(name: str) -> None:
    column = columns()[name]
    for other in (column[:-1], np.concatenate([column, column[:1]])):
        assert f"column '{name}' has shape {other.shape}" in _refusal(**{name: other})


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_a_column_that_others_are_measured_by_must_agree_with_them(name: str) -> None:
    column = columns()[name]
    for other in (column[:-1], np.concatenate([column, column[:1]])):
        assert f"column '{MEASURES[name]}" in _refusal(**{name: other})


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("final_", "segment_"))])
def test_an_index_column_with_a_dimension_too_many_is_refused(name: str) -> None:
    assert "has shape" in _refusal(**{name: columns()[name][..., None]})


@pytest.mark.parametrize("shape", [(), (16,), (2, 2, 4)])
def test_rewards_must_be_over_rows_and_steps(shape: tuple[int, ...]) -> None:
    rewards = np.zeros(shape, np.float32)
    assert f"rewards must have shape [N, T], not {shape}" in _refusal(rewards=rewards)


def test_bootstrap_observations_must_have_the_shape_of_observations() -> None:
    for name in ("last_observations", "final_observations"):
        assert f"column '{name}' has shape" in _refusal(**{name: columns()[name][:, :1]})


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
    assert f"column '{name}' holds an index outside" in _refusal(**_changed(name, (0,), value))


@pytest.mark.parametrize("name", ["segment_starts", "segment_lengths"])
def test_a_segment_that_goes_beyond_its_row_is_refused(name: str) -> None:
    said = _refusal(**_changed(name, (1,), 3))
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
    assert "cover each live step once" in _refusal(**_changed(name, at, value))


def test_an_episode_that_ends_within_a_segment_is_refused() -> None:
    assert "ends within a segment" in _refusal(**_changed("terminated", (0, 0), True))


def test_the_greatest_start_and_length_do_not_overflow() -> None:
    greatest = np.iinfo(np.int32).max
    assert "segment_lengths" in _refusal(**_changed("segment_lengths", (1,), greatest))
    assert "segment_starts" in _refusal(**_changed("segment_starts", (1,), greatest))


def test_a_final_observation_of_a_step_that_is_not_truncated_is_refused() -> None:
    assert "not truncated" in _refusal(**_changed("final_steps", (0,), 0))
    assert "not truncated" in _refusal(**_changed("truncated", (2, 3), False))


def test_a_truncated_step_without_its_final_observation_is_refused() -> None:
    assert "lacks its final observation" in _refusal(**_changed("truncated", (1, 1), True))
    without = {name: columns()[name][:1] for name in columns() if name.startswith("final_")}
    assert "lacks its final observation" in _refusal(**without)


def test_two_final_observations_of_one_step_do_not_stand_for_two_steps() -> None:
    twice = {"final_rows": np.array([0, 0], np.int32), "final_steps": np.array([1, 1], np.int32)}
    assert "lacks its final observation" in _refusal(**twice)


@pytest.mark.parametrize("prefix", ["final_", "segment_"])
def test_scalars_in_place_of_index_columns_are_refused(prefix: str) -> None:
    scalars = {name: c[0] for name, c in columns().items() if name.startswith(prefix)}
    assert prefix in _refusal(**{name: np.asarray(c) for name, c in scalars.items()})


def test_a_segment_without_a_step_is_refused() -> None:
    assert "segment_lengths" in _refusal(**_changed("segment_lengths", (0,), 0))


def test_a_segment_that_began_before_its_episode_is_refused() -> None:
    assert "segment_offsets" in _refusal(**_changed("segment_offsets", (0,), -1))


_GROUPS = [[name] for name in NAMES if name != "states"] + [
    [name for name in NAMES if name.startswith(prefix)] for prefix in ("final_", "segment_")
]
_DAMAGES: list[Callable[[Any], Any]] = [
    lambda column: column[:1],
    lambda column: column[..., None],
    lambda column: np.asarray(column[0]),
    lambda column: column.astype(np.float64),
    lambda column: {"x": column},
]


@st.composite
def _damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A good tree with a few entries changed, or a few columns put out of shape."""
    tree = columns()
    if draw(st.booleans()):
        for names in draw(st.lists(st.sampled_from(_GROUPS), min_size=1, max_size=2)):
            damage = draw(st.sampled_from(_DAMAGES))
            tree.update({name: damage(columns()[name]) for name in names})
        return tree
    arrays = sorted(set(NAMES) - {"states"})
    small = [name for name in arrays if tree[name].dtype in (np.int32, np.bool_)]
    for name in draw(st.lists(st.sampled_from(small), min_size=1, max_size=6)):
        at = draw(st.integers(0, tree[name].size - 1))
        tree[name].flat[at] = draw(st.integers(-1, 5))
    return tree


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(_damaged())
def test_a_damaged_tree_is_refused_or_all_of_its_episodes_can_be_read(tree: dict[str, Any]) -> None:
    try:
        batch = EpisodeBatch.from_tree(tree)
    except WireError:
        return
    for episode in batch.episodes():
        assert 1 <= len(episode) <= batch.steps
        for tree in (episode.observations, episode.actions):
            assert all(len(array) == len(episode) for _, array in flatten(tree))
        assert len(episode.action_logp) == len(episode)
        last = [array.shape for _, array in flatten(episode.last_observation)]
        assert last == [array.shape[2:] for _, array in flatten(batch.observations)]


# -- trees in columns -----------------------------------------------------------------------------


def _tree_columns(**changed: Any) -> dict[str, Any]:
    """The usual batch with its observations [r, t] in a Dict and a Tuple, and a state."""
    return {
        **columns(),
        **{name: _split(columns()[name]) for name in TREES if name.endswith("observations")},
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


# -- episodes -------------------------------------------------------------------------------------


def test_episodes_say_who_they_are_and_which_weights_acted() -> None:
    found = list(EpisodeBatch.from_tree(columns()).episodes())
    assert [episode.episode_id for episode in found] == [11, 12, 13, 14, 15, 15]
    assert [len(episode) for episode in found] == [2, 2, 3, 4, 2, 2]
    assert [episode.offset for episode in found] == [0, 0, 5, 0, 0, 2]
    assert [episode.version for episode in found] == [(1, 7)] * 5 + [(1, 8)]


def test_episodes_say_how_they_ended() -> None:
    found = list(EpisodeBatch.from_tree(columns()).episodes())
    assert {i for i, e in enumerate(found) if e.truncated} == {
        TRUNCATED_IN_MID_ROW,
        TRUNCATED_AT_THE_END,
    }
    assert {i for i, e in enumerate(found) if e.terminated} == {TERMINATED}


@pytest.mark.parametrize(
    ("segment", "row", "start"),
    [
        (TRUNCATED_IN_MID_ROW, 0, 0),
        (RUNNING, 0, 2),
        (TERMINATED, 1, 0),
        (TRUNCATED_AT_THE_END, 2, 0),
        (SECOND_HALF, 3, 2),
    ],
)
def test_an_episode_is_a_view_of_its_stretch_of_the_row(segment: int, row: int, start: int) -> None:
    batch = EpisodeBatch.from_tree(columns())
    episode = list(batch.episodes())[segment]
    stretch = slice(start, start + len(episode))
    for name in ("observations", "actions", "rewards", "action_logp"):
        view = getattr(episode, name)
        np.testing.assert_array_equal(view, getattr(batch, name)[row, stretch])
        assert np.shares_memory(view, getattr(batch, name))


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        (TRUNCATED_IN_MID_ROW, [100, 1]),
        (TRUNCATED_AT_THE_END, [102, 3]),
        (RUNNING, [0, 4]),
        (FIRST_HALF, [3, 2]),
        (SECOND_HALF, [3, 4]),
        (TERMINATED, [1, 3]),
    ],
)
def test_the_last_observation_is_the_one_after_the_last_step(
    segment: int, expected: list[float]
) -> None:
    found = list(EpisodeBatch.from_tree(columns()).episodes())
    assert found[segment].last_observation.tolist() == expected


def test_the_last_observation_of_an_episode_that_terminates_with_its_row_is_the_rows_own() -> None:
    ends = _changed("terminated", (3, 3), True)
    episode = list(EpisodeBatch.from_tree(columns(**ends)).episodes())[SECOND_HALF]
    assert episode.terminated
    assert episode.last_observation.tolist() == [3, 4]


def test_final_observations_may_come_in_any_order() -> None:
    turned = {name: c[::-1] for name, c in columns().items() if name.startswith("final_")}
    found = list(EpisodeBatch.from_tree(columns(**turned)).episodes())
    assert found[TRUNCATED_IN_MID_ROW].last_observation.tolist() == [100, 1]
    assert found[TRUNCATED_AT_THE_END].last_observation.tolist() == [102, 3]
