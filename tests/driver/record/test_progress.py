"""How a run is shown: plain lines, and which display it gets."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest
from support.progress_lines import CONFIG, SUMMARY, live_display, metrics_line, panel

from juggler.driver.record.live_progress import LiveProgress
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


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_plain_lines_say_how_the_run_goes() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(CONFIG)
    progress.update(metrics_line())
    progress.finish(SUMMARY)
    assert stream.getvalue().splitlines() == [
        "training CartPole-v1 with impala until a return of 475 or 2M steps, seed 3",
        "  1.0 s  return   237.5  steps  100k  51.2k steps/s  staleness 0.75  updates 1200"
        "  envrunners 2  37.1 s left",
        "solved: return 480.2 after 312k steps in 9.4 s",
        "run directory: runs/cartpole",
        "checkpoint: runs/cartpole/checkpoints/000000300",
    ]


def test_workers_that_were_started_again_are_counted_with_the_last_reason() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(CONFIG)
    progress.update(metrics_line(restarts=3))
    failed = "environment 4 (Robot) failed in step: RuntimeError: no contact"
    progress.finish({**SUMMARY, "restarts": 1200, "last_restart": f"envrunner-0: {failed}"})
    _, line, *end = stream.getvalue().splitlines()
    assert "envrunners 2  restarts 3  37.1 s left" in line
    assert end[-1] == f"restarts: 1,200, the last of envrunner-0: {failed}"


def test_the_end_of_a_league_says_what_its_returns_are_of() -> None:
    stream = io.StringIO()
    returns = {name: {"episode_return_mean": 0.5} for name in ("main", "exploiter")}
    PlainProgress(stream).finish({**SUMMARY, "league": {"players": 3}, "by_module": returns})
    assert "returns: each player's own matches, also with frozen" in stream.getvalue()


def test_a_run_of_several_modules_shows_the_algorithm_and_the_return_of_each() -> None:
    """In a game of opponents the sum over agents is 0, whoever wins."""
    config = {**CONFIG, "modules": {"hunter": {"lr": 1e-3}, "prey": {"algorithm": "ppo"}}}
    returns = {"hunter": 0.65, "prey": -0.65}
    by_module = {name: {"episode_return_mean": mean} for name, mean in returns.items()}
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(config)
    progress.update(metrics_line(episode_return_mean=0.0, by_module=by_module))
    progress.finish({**SUMMARY, "episode_return_mean": 0.0, "by_module": by_module})
    start, line, end, *_ = stream.getvalue().splitlines()
    assert start.startswith("training CartPole-v1 with impala (prey: ppo) until ")
    assert "return    0.00 (hunter 0.65, prey -0.65)  steps" in line
    assert end.startswith("solved: return 0.00 (hunter 0.65, prey -0.65) after 312k steps")
    with live_display(120) as (live, _):
        live.update(metrics_line(by_module=by_module))
        assert "hunter 0.65, prey -0.65 · 1,200 updates" in panel(live, 120)


def test_a_line_does_not_grow_with_the_number_of_modules() -> None:
    line = metrics_line(by_module={f"m{k}": {"episode_return_mean": None} for k in range(9)})
    assert each_return(line) == "m0 -, m1 -, m2 -, m3 - and 5 more"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"modules": {"default": {"replay_steps_missing": 6800.0}}},
            "6.8k more steps in the replay",
        ),
        (
            {"modules": {"default": {"replay_steps_missing": 1.0}}},
            "1 more step in the replay",
        ),
        ({"modules": {"default": {"replay_steps_missing": 0.0}}}, ""),
        ({"modules": {"default": {"lr": 1e-3}}}, ""),
        ({"modules": {}}, ""),
        (
            {
                "modules": {
                    "a": {"replay_steps_missing": 70.0},
                    "b": {"replay_steps_missing": 90.0},
                    "gone": {"replay_steps_missing": 500.0},
                },
                "by_module": {name: {"episode_return_mean": None} for name in "ab"},
            },
            "90 more steps in the replay of b",
        ),
    ],
)
def test_people_are_told_what_learning_waits_for_while_a_replay_fills(
    changes: dict[str, Any], words: str
) -> None:
    line, stream = metrics_line(**changes), io.StringIO()
    PlainProgress(stream).update(line)
    with live_display(120) as (live, _):
        live.update(line)
        shown = panel(live, 120)
    for text in (stream.getvalue(), shown):
        assert ("learning waits for" in text) == bool(words)
        assert words in text


def test_plain_lines_come_every_two_seconds() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for tenth in range(101):
        progress.update(metrics_line(wall_time=tenth / 10))
    times = [float(line.split()[0]) for line in stream.getvalue().splitlines()]
    assert times == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_the_first_lines_of_a_run_have_no_return_and_no_staleness_yet() -> None:
    line = metrics_line(episode_return_mean=None, staleness_mean=None, staleness_max=None)
    stream = io.StringIO()
    PlainProgress(stream).update(line)
    assert "return       -" in stream.getvalue()
    with live_display(80) as (progress, _):
        progress.update(line)
        assert "staleness - (max -)" in panel(progress, 80)


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
    progress.update(metrics_line())
    progress.message("hello", "error")
    progress.finish(SUMMARY)
    assert capsys.readouterr() == ("", "")


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
def test_times_from_a_minute_on_look_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
