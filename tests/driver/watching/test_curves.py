"""What a page draws of a run's metrics and league."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.made_files import append, checkpoint, league_state, line, made

from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.reporting.run_directory import read_metrics
from juggler.driver.watching.page_server import MOST_POINTS, Curves, league_matrix
from juggler.runtime.checkpoints.checkpoint import CheckpointError, write


class Reader:
    """A reader that follows the curves as a page does."""

    def __init__(self, curves: Curves) -> None:
        self.curves, self.seen, self.keys = curves, "", []
        self.rows: list[list[Any]] = []

    def read(self) -> int:
        """Returns how many rows came."""
        self.curves.read()
        told = self.curves.since(self.seen)
        self.rows = told["rows"] if told["all"] else [*self.rows, *told["rows"]]
        self.seen, self.keys = told["seen"], told["keys"]
        return len(told["rows"])

    def column(self, key: str) -> list[Any]:
        place = self.keys.index(key)
        return [row[place] for row in self.rows]


def test_a_run_that_was_resumed_has_the_same_course_as_for_a_plot(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run", [line(100, 1.0), line(200, 2.0), line(300, 3.0)])
    reader = Reader(Curves(run_dir))
    reader.read()
    append(run_dir, line(150, 9.0, 0.5), line(250, 10.0, 1.5))
    reader.read()
    plotted = read_metrics(run_dir).lines
    for key in ("env_steps_sampled", "training_time", "episode_return_mean"):
        assert reader.column(key) == [each[key] for each in plotted]
    assert reader.column("env_steps_sampled") == [100, 150, 250]


def test_of_a_long_run_few_points_are_kept_that_are_still_those_of_its_file(tmp_path: Path) -> None:
    steps = range(1, 10 * MOST_POINTS)
    run_dir = made(tmp_path / "run", [line(n, float(n)) for n in steps])
    reader = Reader(Curves(run_dir))
    reader.read()
    assert MOST_POINTS / 4 < len(reader.rows) <= MOST_POINTS
    assert reader.column("env_steps_sampled") == reader.column("episode_return_mean")
    gaps = {
        b - a for a, b in zip(reader.rows, reader.rows[1:], strict=False) for a, b in [(a[0], b[0])]
    }
    assert len(gaps) == 1, "they are alike in distance"
    assert reader.curves.newest["env_steps_sampled"] == steps[-1]
    append(run_dir, *(line(n, 0.0) for n in range(steps[-1], steps[-1] + 64)))
    assert 0 < reader.read() < 64


def test_losses_and_returns_of_modules_agents_and_players_are_columns(tmp_path: Path) -> None:
    of_module = {"episode_return_mean": 4.0, "env_steps_sampled": 50}
    run_dir = made(
        tmp_path / "run",
        [
            line(100, None),  # before there is any of it
            line(
                200,
                1.0,
                modules={"main": {"policy_loss": 0.25}},
                by_module={"main": of_module},
                by_agent={"row/1": of_module},
                league={"learning": {"main": {"elo": 12.5, "win_rate": None}}},
                custom={"half": 0.5, "of/two": None},
                info={f"row/1/x{k}": {"mean": 3.0, "least": 1.0} for k in range(130)},
                env_steps_dropped={"stale": 30, "shutdown": 12},
            ),
        ],
    )
    reader = Reader(Curves(run_dir))
    reader.read()
    assert reader.column("env_steps_dropped") == [0, 42]
    assert {key: reader.column(key) for key in reader.keys if "/" in key} == {
        "modules/main/policy_loss": [None, 0.25],
        "by_module/main/episode_return_mean": [None, 4],
        "by_agent/row/1/episode_return_mean": [None, 4],
        "custom/half": [None, 0.5],
        **{f"info/row/1/x{k}/mean": [None, 3] for k in range(128)},
        "league/main/elo": [None, 12.5],
    }


# The table of results between players, from a checkpoint.


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
