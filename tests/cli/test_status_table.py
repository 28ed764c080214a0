"""What `juggler status` makes of what a driver says."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from juggler.cli.status_table import table
from juggler.driver.asking import to_plain
from juggler.runtime.wire.v1 import status_pb2

STATUS = status_pb2.RunStatus(
    run_id="run1",
    env="CartPole-v1",
    algorithm="impala",
    phase="training",
    wall_seconds=83.0,
    steps=status_pb2.StepBooks(
        sampled=1000, trained=900, dropped={"stale": 60, "learner_lost": 30}, in_flight=10
    ),
    staleness=status_pb2.Histogram(bounds=[0, 1], counts=[1, 2, 1], sum=6.0),
    workers=[
        status_pb2.WorkerStatus(
            worker_id="envrunner-10",
            role="envrunner",
            host="far",
            pid=7,
            state="ready",
            seconds_silent=8.0,
        ),
        status_pb2.WorkerStatus(
            worker_id="envrunner-2",
            role="envrunner",
            host="far",
            pid=8,
            state="down",
            last_error="ValueError: \x1b[31mno\x1b[0m",
            seconds_since_error=65.0,
        ),
    ],
    log_messages=[status_pb2.LogMessage(level="error", text=f"trouble {n}") for n in range(9)],
)


def _drawn(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table(STATUS, width))
    return captured.get()


def test_the_table_says_what_people_look_for() -> None:
    drawn = _drawn(200)
    assert "run run1: training, 1:23" in drawn
    assert "1k sampled = 900 trained + 90 dropped + 10 in flight" in drawn
    assert "30 learner_lost, 60 stale" in drawn
    assert "staleness 1.50 on average" in drawn
    assert "1:05 ago: ValueError: no" in drawn
    assert "trouble 8" in drawn
    assert "trouble 1" not in drawn, "only the newest"


def test_a_module_that_is_not_trained_is_marked() -> None:
    status = status_pb2.RunStatus()
    status.modules.add(module_id="hunter", return_mean=0.5)
    status.modules.add(module_id="random", return_mean=-0.5, steps_played=0)
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(table(status, 200))
    assert "hunter 0.50, random (not trained) -0.50" in captured.get()


def test_returns_of_a_league_say_what_they_are_of() -> None:
    status = status_pb2.RunStatus(league=status_pb2.LeagueStatus(players=2))
    status.modules.add(module_id="main", return_mean=0.5)
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(table(status, 200))
    assert "of each player's own matches, also with frozen players" in captured.get()


def test_workers_are_in_order_of_their_numbers() -> None:
    drawn = _drawn(200)
    assert drawn.index("envrunner-2") < drawn.index("envrunner-10")


@pytest.mark.parametrize(("width", "has_hosts"), [(200, True), (80, False)])
def test_a_narrow_terminal_has_what_matters_most(width: int, has_hosts: bool) -> None:
    drawn = _drawn(width)
    assert ("far" in drawn) == has_hosts
    for text in ("envrunner-10", "restarts", "down", "ValueError:"):
        assert text in drawn
    narrow = drawn.count("envrunner-2, 1:05 ago: ValueError: no\n")
    assert narrow == (width == 80), "an error has the whole width"
    assert max(map(len, drawn.splitlines())) <= width


def test_json_has_every_field_and_whole_numbers() -> None:
    plain = json.loads(json.dumps(to_plain(STATUS)))
    assert plain.keys() == set(STATUS.DESCRIPTOR.fields_by_name)
    assert plain["steps"]["sampled"] == 1000
    assert plain["steps"]["dropped"] == {"stale": 60, "learner_lost": 30}
    assert plain["staleness"]["counts"] == [1, 2, 1]
    assert plain["episodes"] is None
    assert plain["workers"][0]["worker_id"] == "envrunner-10"
    assert plain["workers"][1]["version"] is None
