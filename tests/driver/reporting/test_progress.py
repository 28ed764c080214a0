"""How a run is shown: lines, display, and journal."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from juggler.driver.reporting.live_progress import LiveProgress
from juggler.driver.reporting.progress import (
    EVENTS_FILE,
    Journal,
    JsonProgress,
    PlainProgress,
    make_progress,
)
from juggler.driver.reporting.wording import mean_return

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


def metrics_line(wall_time: float = 1.0, **changes: Any) -> dict[str, Any]:
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


@contextmanager
def live_display(
    width: int, config: dict[str, Any] = CONFIG
) -> Iterator[tuple[LiveProgress, io.StringIO]]:
    """A live display in a terminal of this width, always stopped."""
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=30, force_terminal=True, color_system=None)
    progress = LiveProgress(console)
    progress.start(config)
    try:
        yield progress, screen
    finally:
        progress._live.stop()


def panel(progress: LiveProgress, width: int) -> str:
    """What the display shows now."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


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


CONFIRMATION = {
    "confirmed": True,
    "return_mean": 492.1,
    "return_deviation": 20.3,
    "episodes": 100,
    "training_return_mean": 476.5,
    "env_steps_trained": 301_000,
}
RETURNS = {name: {"episode_return_mean": 0.5} for name in ("main", "exploiter")}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"restarts": 1200, "last_restart": "envrunner-0: no contact"},
            "restarts: 1,200, the last of envrunner-0: no contact",
        ),
        (
            {"league": {"players": 3}, "by_module": RETURNS},
            "returns: each player's own matches, including matches with frozen",
        ),
        (
            {"confirmation": CONFIRMATION},
            "solved: return 476.5 after 301k steps in 9.4 s, confirmed by 100 episodes: "
            "492.1 ± 20.3",
        ),
    ],
)
def test_the_end_says_what_had_to_do_with_it(more: dict[str, Any], said: str) -> None:
    stream = io.StringIO()
    PlainProgress(stream).finish({**SUMMARY, **more})
    assert [line for line in stream.getvalue().splitlines() if line.startswith(said)]


def test_a_run_of_several_modules_shows_the_algorithm_and_the_return_of_each() -> None:
    """Among opponents the sum over agents is always 0."""
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


def test_lines_name_some_of_many_agents_and_the_status_all_of_them() -> None:
    agents = {f"agent-{n}": {"episode_return_mean": float(n)} for n in range(6)}
    line = metrics_line(by_agent=agents)
    assert "agent-3 3.0" in mean_return(line)
    assert "and 2 more" in mean_return(line)
    assert "agent-5 5.0" in mean_return(line, most=None)
    assert "more" not in mean_return(line, most=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"modules": {"default": {"replay_steps_missing": 6800.0}}},
            "6.8k more steps in the replay",
        ),
        ({"modules": {"default": {"replay_steps_missing": 1.0}}}, "1 more step in the replay"),
        ({"modules": {"default": {"replay_steps_missing": 0.0}}}, ""),
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


def test_a_run_goes_on_when_nobody_reads_any_more() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        progress = PlainProgress(stream)
        progress.message("first")
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)
        for _ in range(3):
            progress.message("this has no reader")
    assert stream.closed


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


# The live display of a run in a terminal.


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


@pytest.mark.parametrize(
    ("stops", "left"),
    [
        ({"stop_steps": 200_000, "stop_seconds": None}, "10.0 s left"),
        ({"stop_steps": 200_000, "stop_seconds": 5.0}, "4.0 s left"),
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


def test_messages_stand_above_the_live_display_as_they_are() -> None:
    with live_display(80) as (progress, screen):
        progress.message("Traceback\n  raise ValueError('[bold]x[/bold] \x1b[2J')", "error")
        assert "error: Traceback\n  raise ValueError('[bold]x[/bold] ')" in screen.getvalue()
        assert "│ error: Traceback " in panel(progress, 80)


def test_the_live_display_gives_the_cursor_back() -> None:
    with live_display(80) as (progress, screen):
        assert "\x1b[?25l" in screen.getvalue()  # hidden
        progress.finish(SUMMARY)
        assert "\x1b[?25h" in screen.getvalue()
        assert screen.getvalue().rstrip().endswith(str(SUMMARY["checkpoint"]))


# Events are recorded even if the disk fails.


def test_messages_are_shown_and_written(tmp_path: Path) -> None:
    shown = StringIO()
    journal = Journal(PlainProgress(shown), tmp_path, "run1")
    journal.message("envrunner-0 left: \x1b[31mgone\x1b[0m\nTraceback", "error")
    journal.message("and so on")
    assert shown.getvalue().startswith("error: envrunner-0 left: gone\nTraceback\n")
    first, second = (tmp_path / EVENTS_FILE).read_text().splitlines()
    record = json.loads(first)
    assert record["message"] == "envrunner-0 left: gone\nTraceback"
    assert (record["level"], record["run"], record["worker"]) == ("error", "run1", "driver")
    assert json.loads(second)["level"] == "info"
    assert [each[1:] for each in journal.newest] == [
        ("error", "envrunner-0 left: gone"),
        ("info", "and so on"),
    ]


def test_where_nothing_can_be_written_it_says_so_once(tmp_path: Path) -> None:
    shown = StringIO()
    journal = Journal(PlainProgress(shown), tmp_path / "missing", "run1")
    journal.message("one")
    journal.message("two")
    lines = shown.getvalue().splitlines()
    assert [line for line in lines if "cannot write" in line] == [lines[1]]
    assert (lines[0], lines[2]) == ("one", "two")


def test_json_lines_have_the_runs_id(tmp_path: Path) -> None:
    shown = StringIO()
    journal = Journal(JsonProgress(shown), tmp_path, "run1")
    journal.start({"env": "CartPole-v1", "algorithm": "impala"})
    journal.message("trouble", "warning")
    first, second = map(json.loads, shown.getvalue().splitlines())
    assert (first["run"], first["message"]) == (
        "run1",
        "training CartPole-v1 with impala until it is interrupted",
    )
    assert (second["level"], second["message"]) == ("warning", "trouble")
