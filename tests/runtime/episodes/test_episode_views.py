"""The episodes of an EpisodeBatch: whose they are, how they ended, and views of its columns."""

from __future__ import annotations

import numpy as np
import pytest
from support.episode_columns import (
    FIRST_HALF,
    RUNNING,
    SECOND_HALF,
    TERMINATED,
    TRUNCATED_AT_THE_END,
    TRUNCATED_IN_MID_ROW,
    column_with,
    columns,
)

from juggler.runtime.episodes.batch import EpisodeBatch


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
    ends = column_with("terminated", (3, 3), True)
    episode = list(EpisodeBatch.from_tree(columns(**ends)).episodes())[SECOND_HALF]
    assert episode.terminated
    assert episode.last_observation.tolist() == [3, 4]


def test_final_observations_may_come_in_any_order() -> None:
    turned = {name: c[::-1] for name, c in columns().items() if name.startswith("final_")}
    found = list(EpisodeBatch.from_tree(columns(**turned)).episodes())
    assert found[TRUNCATED_IN_MID_ROW].last_observation.tolist() == [100, 1]
    assert found[TRUNCATED_AT_THE_END].last_observation.tolist() == [102, 3]
