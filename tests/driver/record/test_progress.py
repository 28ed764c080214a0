from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from juggler.driver.record.live_progress import Curve, LiveProgress
from juggler.driver.record.progress import (
    PlainProgress,
    SilentProgress,
    clock,
    make_progress,
    number,
    plain,
    quantity,
)
from juggler.driver.record.wording import each_return

CONFIG = {
    "env": "CartPole-v1",
    "algorithm": "impala",
    "seed": 3,
    "stop_return": 475.0,
    "stop_steps": 2_000_000,
    "stop_seconds": None,
}
SUMMARY = {
    "solved": True,
    "episode_return_mean": 480.25,
    "env_steps_trained": 312_000,
    "wall_time": 9.4,
    "reason_for_stop": "solved",
    "run_dir": "runs/cartpole",
    "checkpoint": "runs/cartpole/checkpoints/000000300",
}


def _line(wall_time: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "wall_time": wall_time,
        "env_steps_sampled": 104_096,
        "env_steps_trained": 100_000,
        "env_steps_dropped": {},
        "updates": 1200,
        "staleness_mean": 0.75,
        "staleness_max": 2,
        "episode_return_mean": 237.5,
        "evaluation_return_mean": None,
        "steps_per_second": 51_234.5,
        "num_env_runners": 2,
        "num_learners": 1,
        "restarts": 0,
        **changes,
    }


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextmanager
def _live(
    width: int, config: dict[str, Any] = CONFIG
) -> Iterator[tuple[LiveProgress, io.StringIO]]:
    """A live display in a terminal of that width, stopped in any case."""
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=30, force_terminal=True, color_system=None)
    progress = LiveProgress(console)
    progress.start(config)
    try:
        yield progress, screen
    finally:
        progress._live.stop()


def _panel(progress: LiveProgress, width: int) -> str:
    """What the display shows now."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_say_how_the_run_goes() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(CONFIG)
    progress.update(_line())
    progress.finish(SUMMARY)
    assert stream.getvalue().splitlines() == [
        "training CartPole-v1 with impala until a return of 475 or 2M steps, seed 3",
        "  1.0 s  return   237.5  steps  100k  51.2k steps/s  staleness 0.75  updates 1200"
        "  envrunners 2  37.1 s left",
        "solved: return 480.2 after 312k steps in 9.4 s",
        "run directory: runs/cartpole",
        "checkpoint: runs/cartpole/checkpoints/000000300",
    ]


def test_a_run_of_several_modules_shows_the_algorithm_and_the_return_of_each() -> None:
    """In a game of opponents the sum over agents is 0, whoever wins."""
    config = {**CONFIG, "modules": {"hunter": {"lr": 1e-3}, "prey": {"algorithm": "ppo"}}}
    returns = {"hunter": 0.65, "prey": -0.65}
    by_module = {name: {"episode_return_mean": mean} for name, mean in returns.items()}
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(config)
    progress.update(_line(episode_return_mean=0.0, by_module=by_module))
    progress.finish({**SUMMARY, "episode_return_mean": 0.0, "by_module": by_module})
    start, line, end, *_ = stream.getvalue().splitlines()
    assert start.startswith("training CartPole-v1 with impala (prey: ppo) until ")
    assert "return    0.00 (hunter 0.65, prey -0.65)  steps" in line
    assert end.startswith("solved: return 0.00 (hunter 0.65, prey -0.65) after 312k steps")
    with _live(120) as (live, _):
        live.update(_line(by_module=by_module))
        assert "hunter 0.65, prey -0.65 · 1,200 updates" in _panel(live, 120)


def test_a_line_does_not_grow_with_the_number_of_modules() -> None:
    line = _line(by_module={f"m{k}": {"episode_return_mean": None} for k in range(9)})
    assert each_return(line) == "m0 -, m1 -, m2 -, m3 - and 5 more"


def test_plain_lines_come_every_two_seconds() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for tenth in range(101):
        progress.update(_line(wall_time=tenth / 10))
    times = [float(line.split()[0]) for line in stream.getvalue().splitlines()]
    assert times == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_the_first_lines_of_a_run_have_no_return_and_no_staleness_yet() -> None:
    line = _line(episode_return_mean=None, staleness_mean=None, staleness_max=None)
    stream = io.StringIO()
    PlainProgress(stream).update(line)
    assert "return       -" in stream.getvalue()
    with _live(80) as (progress, _):
        progress.update(line)
        assert "staleness - (max -)" in _panel(progress, 80)


def test_the_live_display_says_for_how_long_no_episode_has_ended() -> None:
    with _live(80) as (progress, _):
        progress.update(_line(episode_return_age=9.0))
        assert "no episode" not in _panel(progress, 80)
        progress.update(_line(episode_return_age=83.0))
        assert "no episode has ended for 1:23" in _panel(progress, 80)


def test_a_run_that_was_not_solved_says_why_it_ended() -> None:
    stream = io.StringIO()
    PlainProgress(stream).finish({**SUMMARY, "solved": False, "reason_for_stop": "learner_lost"})
    assert stream.getvalue().startswith("ended (learner_lost): return 480.2")


def test_a_run_that_was_confirmed_says_by_what() -> None:
    confirmation = {
        "confirmed": True,
        "return_mean": 492.1,
        "return_deviation": 20.3,
        "episodes": 100,
        "training_return_mean": 476.5,
        "env_steps_trained": 301_000,
    }
    stream = io.StringIO()
    PlainProgress(stream).finish({**SUMMARY, "confirmation": confirmation})
    assert stream.getvalue().splitlines()[0] == (
        "solved: return 476.5 after 301k steps in 9.4 s, confirmed by 100 episodes: 492.1 ± 20.3"
    )


def test_a_run_that_nobody_could_confirm_says_why() -> None:
    confirmation = {"confirmed": False, "why_not": "nobody evaluates here"}
    stream = io.StringIO()
    PlainProgress(stream).finish({**SUMMARY, "confirmation": confirmation})
    assert stream.getvalue().splitlines()[0] == (
        "solved: return 480.2 after 312k steps in 9.4 s, not confirmed: nobody evaluates here"
    )


def test_a_run_that_ended_before_its_first_step_has_a_conclusion() -> None:
    stream = io.StringIO()
    PlainProgress(stream).finish({"solved": False, "reason_for_stop": "failed"})
    assert stream.getvalue() == "ended (failed): return - after 0 steps in 0.0 s\n"


def test_messages_carry_their_level_and_no_control_codes() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.message("three\nlines\n\tof it")
    progress.message("\x1b[31mred\x1b[0m \x1b]0;title\x07bell\x07", "error")
    progress.message("again", "warning")
    assert stream.getvalue() == "three\nlines\n\tof it\nerror: red bell\nwarning: again\n"


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b[?25l", "\x1bc", "\r", "\x9b2J", "\x1b]8;;http"])
def test_nothing_moves_the_cursor(text: str) -> None:
    assert "a" + plain(text).replace("2J", "") + "b" == "ab"


def test_a_stream_that_knows_little_gets_what_it_knows() -> None:
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding="ascii")
    PlainProgress(stream).message("größer → ok")
    assert content.getvalue() == b"gr\\xf6\\xdfer \\u2192 ok\n"


def test_a_run_goes_on_when_nobody_reads_any_more() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        progress = PlainProgress(stream)
        progress.message("first")
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)
        for _ in range(3):
            progress.message("nobody hears this")
    assert stream.closed


def test_the_kind_of_display_can_be_chosen() -> None:
    assert type(make_progress("off")) is SilentProgress
    assert isinstance(make_progress("plain"), PlainProgress)
    assert isinstance(make_progress("live"), LiveProgress)


@pytest.mark.parametrize(
    ("term", "encoding", "is_terminal", "kind"),
    [
        ("xterm-256color", "utf-8", True, LiveProgress),
        ("xterm-256color", "utf-8", False, PlainProgress),
        ("xterm-256color", "iso8859-1", True, PlainProgress),
        ("dumb", "utf-8", True, PlainProgress),
    ],
)
def test_the_display_is_live_in_a_terminal_that_can_show_it(
    monkeypatch: pytest.MonkeyPatch, term: str, encoding: str, is_terminal: bool, kind: type
) -> None:
    stream = _Terminal()
    monkeypatch.setattr(_Terminal, "encoding", encoding)
    monkeypatch.setattr(_Terminal, "isatty", lambda _: is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", term)
    assert isinstance(make_progress("auto"), kind)


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SilentProgress()
    progress.start(CONFIG)
    progress.update(_line())
    progress.message("hello", "error")
    progress.finish(SUMMARY)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_display_shows_the_run(width: int) -> None:
    with _live(width) as (progress, _):
        assert "starting: " in _panel(progress, width)
        progress.update(_line(episode_return_mean=20.0))
        progress.update(_line(evaluation_return_mean=300.0, env_steps_dropped={"stale": 2048}))
        progress.update(_line(restarts=1, env_steps_dropped={"stale": 0, "learner_lost": 2048}))
        shown = _panel(progress, width)
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
    plain_lines.update(_line(wall_time=5.0))
    assert [line[:40] for line in stream.getvalue().splitlines()] == [
        "  0.5 s  starting: the forkserver import",
        "training CartPole-v1 with impala until a",
        "  2.6 s  starting: no EnvRunner is here ",
        "  5.0 s  return   237.5  steps  100k  51",
    ]
    with _live(80) as (progress, _):
        progress.waiting("no EnvRunner is here yet, of 2", 2.6)
        shown = _panel(progress, 80)
        assert "starting: no EnvRunner is here yet, of 2" in shown
        assert "updates" not in shown
        assert "3 s" in shown
        progress.update(_line())
        assert "1,200 updates" in _panel(progress, 80)


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
    with _live(80) as (progress, _):
        progress.update(_line())
        assert _panel(progress, 80).splitlines()[-1] == ""
        progress.finish(SUMMARY)
        assert _panel(progress, 80).splitlines()[-1].startswith("╰")


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
    line = _line(wall_time=1.0, training_time=1.0, steps_per_second=10_000.0)
    stream = io.StringIO()
    plain_lines = PlainProgress(stream)
    plain_lines.start({**CONFIG, **stops})
    plain_lines.update(line)
    assert stream.getvalue().endswith(f"  {left}\n")
    with _live(80, {**CONFIG, **stops}) as (progress, _):
        progress.update(line)
        shown = _panel(progress, 80)
        assert " left ─╯" in shown
        assert ("time" in shown) == (stops["stop_seconds"] is not None)


@pytest.mark.parametrize("stop_return", [475.0, -100.0])
def test_the_bar_starts_at_the_first_return_and_ends_at_the_goal(stop_return: float) -> None:
    config = {**CONFIG, "stop_return": stop_return, "stop_steps": None}
    first = stop_return - 400
    lengths = []
    with _live(80, config) as (progress, _):
        for done in (0.0, 0.5, 1.0, 2.0, -1.0):
            progress.update(_line(episode_return_mean=first + done * 400))
            row = next(row for row in _panel(progress, 80).splitlines() if "return" in row)
            lengths.append(row.count("━") + 0.5 * row.count("╸"))
    nothing, half, whole, beyond, below = lengths
    assert nothing == below == 0
    assert half == pytest.approx(whole / 2, abs=0.5)
    assert whole == beyond > 20


def test_a_run_without_a_goal_has_no_bar() -> None:
    config: dict[str, Any] = {"env": "Pendulum-v1", "algorithm": "impala"}
    with _live(80, config) as (progress, _):
        progress.update(_line(wall_time=73.0, training_time=65.0))
        shown = _panel(progress, 80)
    assert "━" not in shown
    assert "1:13" in shown
    with _live(80, {**config, "stop_seconds": 600.0}) as (progress, _):
        progress.update(_line(wall_time=73.0, training_time=65.0))
        shown = _panel(progress, 80)
    assert "━" in shown
    assert re.search("training for 1:0[5-9] of 10:00 · 8:5[0-5] left", shown)


@pytest.mark.parametrize("width", [1, 2, 5, 10, 20, 40, 59, 60])
def test_no_terminal_is_too_narrow(width: int) -> None:
    with _live(width) as (progress, screen):
        progress.update(_line(restarts=3, env_steps_dropped={"learner_lost": 12}))
        progress.message("a worker said something long\nand more", "warning")
        shown = _panel(progress, width)
        progress.finish(SUMMARY)
    assert shown
    assert "solved" in screen.getvalue().replace("\n", "")


def test_messages_stand_above_the_live_display_as_they_are() -> None:
    with _live(80) as (progress, screen):
        progress.message("Traceback\n  raise ValueError('[bold]x[/bold] \x1b[2J')", "error")
        assert "error: Traceback\n  raise ValueError('[bold]x[/bold] ')" in screen.getvalue()
        assert "│ error: Traceback " in _panel(progress, 80)


def test_an_environment_named_like_markup_is_shown_as_it_is() -> None:
    with _live(80, {**CONFIG, "env": "[red]x[/red]\x1b[2J"}) as (progress, _):
        assert "juggler [red]x[/red] impala" in _panel(progress, 80)


def test_the_live_display_gives_the_cursor_back() -> None:
    with _live(80) as (progress, screen):
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.7, "1k"), (12_345, "12.3k"), (1_234_567, "1.23M"), (2e9, "2G")],
)
def test_quantities_have_three_digits(value: float, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.5, "0.50"),
        (412.34, "412.3"),
        (-1234.56, "-1234.6"),
        (123456.0, "1.235e+05"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_about_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(9.44, "9.4 s"), (83, "1:23"), (7384, "2:03:04")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_plain_progress_needs_neither_rich_nor_torch() -> None:
    code = """
import sys
from juggler.driver.record.progress import make_progress
make_progress("plain").start({})
assert not {"rich", "torch", "numpy"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
