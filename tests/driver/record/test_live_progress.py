"""The live display of a run in a terminal."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console
from support.progress_lines import CONFIG, SUMMARY, live_display, metrics_line, panel

from juggler.driver.record.live_progress import Curve, LiveProgress
from juggler.driver.record.progress import (
    PlainProgress,
)


def test_the_live_display_says_for_how_long_no_episode_has_ended() -> None:
    with live_display(80) as (progress, _):
        progress.update(metrics_line(episode_return_age=9.0))
        assert "no episode" not in panel(progress, 80)
        progress.update(metrics_line(episode_return_age=83.0))
        assert "no episode has ended for 1:23" in panel(progress, 80)


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_display_shows_the_run(width: int) -> None:
    with live_display(width) as (progress, _):
        assert "starting: " in panel(progress, width)
        progress.update(metrics_line(episode_return_mean=20.0))
        progress.update(
            metrics_line(evaluation_return_mean=300.0, env_steps_dropped={"stale": 2048})
        )
        progress.update(
            metrics_line(restarts=1, env_steps_dropped={"stale": 0, "learner_lost": 2048})
        )
        shown = panel(progress, width)
    assert all(len(line) == width for line in shown.splitlines()[:-1])
    for text in (
        "juggler CartPole-v1 impala",
        "237.5",
        "475",
        "100k",
        "2M",
        "51.2k steps/s",
        "1,200 updates · staleness 0.75 (max 2) · 2 envrunners · 1 learner",
        "2.05k steps dropped (learner_lost) · 1 restart",
        "▁█",
    ):
        assert text in shown
    assert "stale)" not in shown
    assert "starting" not in shown


def test_what_is_waited_for_stands_in_place_of_rows_of_zeros() -> None:
    stream = io.StringIO()
    plain_lines = PlainProgress(stream)
    plain_lines.waiting("the forkserver imports torch", 0.5)
    plain_lines.waiting("the forkserver imports torch", 0.7)
    plain_lines.start(CONFIG)
    plain_lines.waiting("no EnvRunner is here yet, of 2", 2.6)
    plain_lines.update(metrics_line(wall_time=5.0))
    assert [line[:40] for line in stream.getvalue().splitlines()] == [
        "  0.5 s  starting: the forkserver import",
        "training CartPole-v1 with impala until a",
        "  2.6 s  starting: no EnvRunner is here ",
        "  5.0 s  return   237.5  steps  100k  51",
    ]
    with live_display(80) as (progress, _):
        progress.waiting("no EnvRunner is here yet, of 2", 2.6)
        shown = panel(progress, 80)
        assert "starting: no EnvRunner is here yet, of 2" in shown
        assert "updates" not in shown
        assert "3 s" in shown
        progress.update(metrics_line())
        assert "1,200 updates" in panel(progress, 80)


def test_before_a_run_begins_its_terminal_has_one_line_that_goes_away() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, height=30, force_terminal=True, color_system=None)
    progress = LiveProgress(console)
    progress.waiting("the forkserver imports torch", 0.5)
    deadline = time.monotonic() + 60
    while "starting: the forkserver imports torch" not in screen.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    progress.stop_waiting()
    assert screen.getvalue().rstrip("\n").endswith("\x1b[2K")  # erased
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back


def test_the_cursor_rests_below_the_live_display_until_the_run_is_over() -> None:
    # A terminal writes "^C" where the cursor is. At a border's end it would begin a new line, of
    # which nobody knows.
    with live_display(80) as (progress, _):
        progress.update(metrics_line())
        assert panel(progress, 80).splitlines()[-1] == ""
        progress.finish(SUMMARY)
        assert panel(progress, 80).splitlines()[-1].startswith("╰")


@pytest.mark.parametrize(
    ("stops", "left"),
    [
        ({"stop_steps": 200_000, "stop_seconds": None}, "10.0 s left"),
        ({"stop_steps": None, "stop_seconds": 65.0}, "1:04 left"),
        ({"stop_steps": 200_000, "stop_seconds": 5.0}, "4.0 s left"),
        ({"stop_steps": 1000, "stop_seconds": None}, "0.0 s left"),
    ],
)
def test_the_time_that_is_left_is_shown_where_a_stop_condition_tells(
    stops: dict[str, Any], left: str
) -> None:
    line = metrics_line(wall_time=1.0, training_time=1.0, steps_per_second=10_000.0)
    stream = io.StringIO()
    plain_lines = PlainProgress(stream)
    plain_lines.start({**CONFIG, **stops})
    plain_lines.update(line)
    assert stream.getvalue().endswith(f"  {left}\n")
    with live_display(80, {**CONFIG, **stops}) as (progress, _):
        progress.update(line)
        shown = panel(progress, 80)
        assert " left ─╯" in shown
        assert ("time" in shown) == (stops["stop_seconds"] is not None)


@pytest.mark.parametrize("stop_return", [475.0, -100.0])
def test_the_bar_starts_at_the_first_return_and_ends_at_the_goal(stop_return: float) -> None:
    config = {**CONFIG, "stop_return": stop_return, "stop_steps": None}
    first = stop_return - 400
    lengths = []
    with live_display(80, config) as (progress, _):
        for done in (0.0, 0.5, 1.0, 2.0, -1.0):
            progress.update(metrics_line(episode_return_mean=first + done * 400))
            row = next(row for row in panel(progress, 80).splitlines() if "return" in row)
            lengths.append(row.count("━") + 0.5 * row.count("╸"))
    nothing, half, whole, beyond, below = lengths
    assert nothing == below == 0
    assert half == pytest.approx(whole / 2, abs=0.5)
    assert whole == beyond > 20


def test_a_run_without_a_goal_has_no_bar() -> None:
    config: dict[str, Any] = {"env": "Pendulum-v1", "algorithm": "impala"}
    with live_display(80, config) as (progress, _):
        progress.update(metrics_line(wall_time=73.0, training_time=65.0))
        shown = panel(progress, 80)
    assert "━" not in shown
    assert "1:13" in shown
    with live_display(80, {**config, "stop_seconds": 600.0}) as (progress, _):
        progress.update(metrics_line(wall_time=73.0, training_time=65.0))
        shown = panel(progress, 80)
    assert "━" in shown
    assert re.search("training for 1:0[5-9] of 10:00 · 8:5[0-5] left", shown)


@pytest.mark.parametrize("width", [1, 2, 5, 10, 20, 40, 59, 60])
def test_no_terminal_is_too_narrow(width: int) -> None:
    with live_display(width) as (progress, screen):
        progress.update(metrics_line(restarts=3, env_steps_dropped={"learner_lost": 12}))
        progress.message("a worker said something long\nand more", "warning")
        shown = panel(progress, width)
        progress.finish(SUMMARY)
    assert shown
    assert "solved" in screen.getvalue().replace("\n", "")


def test_messages_stand_above_the_live_display_as_they_are() -> None:
    with live_display(80) as (progress, screen):
        progress.message("Traceback\n  raise ValueError('[bold]x[/bold] \x1b[2J')", "error")
        assert "error: Traceback\n  raise ValueError('[bold]x[/bold] ')" in screen.getvalue()
        assert "│ error: Traceback " in panel(progress, 80)


def test_an_environment_named_like_markup_is_shown_as_it_is() -> None:
    with live_display(80, {**CONFIG, "env": "[red]x[/red]\x1b[2J"}) as (progress, _):
        assert "juggler [red]x[/red] impala" in panel(progress, 80)


def test_the_live_display_gives_the_cursor_back() -> None:
    with live_display(80) as (progress, screen):
        assert "\x1b[?25l" in screen.getvalue()  # hidden
        progress.finish(SUMMARY)
        assert "\x1b[?25h" in screen.getvalue()
        assert screen.getvalue().rstrip().endswith(str(SUMMARY["checkpoint"]))


def test_a_curve_holds_the_whole_course_in_few_characters() -> None:
    curve = Curve()
    assert curve.drawn() == ""
    for value in range(1000):
        curve.add(float(value))
        assert 1 <= len(curve.drawn()) <= Curve.points
    assert curve.first == 0.0
    assert curve.drawn()[0] == "▁"
    assert curve.drawn()[-1] == "█"
    assert list(curve.drawn()) == sorted(curve.drawn())


def test_a_curve_takes_what_is_no_number() -> None:
    curve = Curve()
    for value in (None, float("nan"), 5.0, float("inf"), 5.0):
        curve.add(value)
    assert curve.drawn() == "▁▁"
