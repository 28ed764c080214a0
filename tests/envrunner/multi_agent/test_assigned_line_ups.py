"""Line-ups of a league go to episodes in order, once."""

from __future__ import annotations

import numpy as np
import pytest

from juggler.envrunner.multi_agent.line_up import AssignedLineUps
from juggler.runtime.wire.v1.training_pb2 import LineUp

AGENTS = ("red", "blue")
#: As a Setup has it; its order is that of line-ups.
PLAYED_BY = {"blue": ["main", "past"], "red": ["main", "past"]}
PLAYERS = {"main", "past"}


def match(match_id: int, *players: str) -> LineUp:
    return LineUp(match_id=match_id, players=players)


def matches(*ids: int) -> list[LineUp]:
    """Of each id, `main` plays blue and `past` plays red."""
    return [match(match_id, "main", "past") for match_id in ids]


def begin(line_ups: AssignedLineUps, *envs: int) -> list[str]:
    line_up = line_ups.begin(np.array(envs))
    assert line_up.slots.tolist() == [2 * env + agent for env in envs for agent in range(2)]
    players: list[str] = line_up.players.tolist()
    return players


def end(line_ups: AssignedLineUps, *envs: int) -> list[int]:
    """Episodes end -> the ids of the matches that are told of."""
    returns = np.array([[env + 1.0, np.nan] for env in envs])  # [L, A]
    line_ups.ended(np.array(envs), returns, np.array([7] * len(envs)))
    return [match.match_id for match in line_ups.pop_ended()]


def test_before_the_first_line_up_the_first_module_plays_and_nothing_is_told() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    assert begin(line_ups, 0) == ["main", "main"]
    assert end(line_ups, 0) == []


def test_players_and_returns_are_in_the_order_of_the_setup() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    line_ups.assign(matches(5), PLAYERS)
    assert begin(line_ups, 3) == ["past", "main"], "red, then blue"
    line_ups.ended(np.array([3]), np.array([[2.0, np.nan]]), np.array([9]))
    (match,) = line_ups.pop_ended()
    assert (match.match_id, match.length) == (5, 9)
    assert np.isnan(match.returns[0])
    assert match.returns[1] == 2.0
    assert line_ups.pop_ended() == []


def test_line_ups_that_are_played_again_are_not_told_of_again() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    line_ups.assign(matches(1, 2), PLAYERS)
    told = []
    for _ in range(5):
        begin(line_ups, 0)
        told += end(line_ups, 0)
    line_ups.assign(matches(3), PLAYERS)
    begin(line_ups, 0)
    assert told == [1, 2]
    assert end(line_ups, 0) == [3]


def test_a_reset_plays_the_matches_that_were_broken_off_from_their_beginning() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    line_ups.assign(matches(1, 2, 3), PLAYERS)
    begin(line_ups, 0, 1)
    line_ups.reset(0)
    begin(line_ups, 0, 1, 2)
    assert end(line_ups, 0, 1, 2) == [1, 2, 3]


def test_a_player_that_goes_is_in_running_episodes_and_in_no_other() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    line_ups.assign([*matches(1, 2), match(3, "main", "main")], PLAYERS)
    begin(line_ups, 0)
    line_ups.forget("past", "main")
    assert line_ups.pop_left() == set()
    assert end(line_ups, 0) == [1]
    assert line_ups.pop_left() == {"past"}
    assert line_ups.pop_left() == set()
    assert begin(line_ups, 0) == ["main", "main"]
    assert end(line_ups, 0) == [3]


def test_another_plays_first_in_place_of_a_player_that_goes() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    line_ups.forget(begin(line_ups, 0)[0], "new")
    assert set(begin(line_ups, 1)) == {"new"}


def test_a_dropped_episode_is_played_again_unless_one_of_its_players_goes() -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    line_ups.assign([*matches(1, 2), match(3, "main", "main")], PLAYERS)
    begin(line_ups, 0)
    line_ups.abandon([0, 7])
    assert end(line_ups, 0) == []
    begin(line_ups, 0, 1, 2)
    line_ups.forget("past", "main")
    line_ups.abandon([0, 2])
    assert line_ups.pop_left() == set(), "it plays in 1"
    begin(line_ups, 0)
    assert end(line_ups, 1, 0) == [2, 3]
    assert line_ups.pop_left() == {"past"}


@pytest.mark.parametrize(
    ("players", "said"),
    [
        (("main",), "match 4 has 1 players: the environment has 2 agents"),
        (("main", "gone"), "match 4 has 'gone', and no such player"),
    ],
)
def test_a_line_up_that_cannot_be_played_is_refused(players: tuple[str, ...], said: str) -> None:
    line_ups = AssignedLineUps(AGENTS, PLAYED_BY)
    with pytest.raises(ValueError, match=said):
        line_ups.assign([match(4, *players)], PLAYERS)
