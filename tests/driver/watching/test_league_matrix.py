"""Who beats whom, as a checkpoint has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.made_checkpoints import checkpoint, league_state

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.record.checkpoints import write
from juggler.driver.watching.watched_run import league_matrix
from juggler.runtime.checkpoints.checkpoint import CheckpointError


def test_win_rates_are_those_of_the_row_and_who_is_retired_is_left_out(tmp_path: Path) -> None:
    players = [
        Player("old", "historical", False, "initial", "main", ready=True),
        Player("main", "main", True, "initial", steps=500, ready=True),
        Player("gone", "historical", False, "initial", "main", ready=True, retired=True),
        Player("late", "historical", False, "initial", "main", ready=True),
    ]
    payoffs = Payoffs(1.0, 1)
    for result in (1, 1, 1, 0):
        payoffs.book("main", "old", result)
    made = checkpoint(counters={"league": league_state(players, payoffs)})
    matrix = league_matrix(write(tmp_path, made), {"min_games": 5})
    assert [each["id"] for each in matrix["players"]] == ["main", "old", "late"]
    assert matrix["win_rates"] == [[None, 0.875, None], [0.125, None, None], [None, None, None]]
    assert matrix["games"][0] == [0, 4, 0]
    assert matrix["min_games"] == 5
    assert matrix["players"][0]["elo"] > matrix["players"][1]["elo"]


def test_of_many_players_those_that_learn_and_the_newest_are_shown(tmp_path: Path) -> None:
    players = [Player("main", "main", True, "initial", ready=True)]
    players += [
        Player(f"v{n}", "historical", False, "initial", "main", ready=True) for n in range(100)
    ]
    made = checkpoint(counters={"league": league_state(players, Payoffs(1.0, 1))})
    matrix = league_matrix(write(tmp_path, made), {})
    shown = [each["id"] for each in matrix["players"]]
    assert (len(shown), matrix["left_out"]) == (40, 61)
    assert (shown[0], shown[1], shown[-1]) == ("main", "v61", "v99")


def test_a_run_without_a_league_has_none_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert league_matrix(write(tmp_path, checkpoint(7)), {}) == {}
    damaged = write(tmp_path, checkpoint(8, counters={"league": {"players": "many"}}))
    with pytest.raises(CheckpointError, match="its league is damaged"):
        league_matrix(damaged, {})
