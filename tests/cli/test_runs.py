"""What is shown of runs and leagues: lists, tables, pictures."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.made_files import checkpoint, line, made

import juggler
from juggler.cli import league, main, train
from juggler.cli.arguments import PlotError, parse
from juggler.cli.league import roster, win_rate_lines
from juggler.cli.plot import RunCurves, _figure, read_run, smoothed
from juggler.cli.plot import save as plot
from juggler.cli.status import table
from juggler.driver import play_checkpoint
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import MedianResults, ShippedConfig, read_shipped, shipped_configs
from juggler.driver.driver_config import AgentsConfig
from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.monitoring import plain_status
from juggler.driver.play_checkpoint import PlayedMatches, _policy
from juggler.driver.reporting.run_directory import RunDirectoryError
from juggler.driver.watching.page_server import PageApplication, _id_of
from juggler.policies.matches import PlayedMatch
from juggler.runtime.checkpoints.checkpoint import Checkpoint, write
from juggler.runtime.wire.v1 import status_pb2


def listed(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["runs", str(directory), "--json"]) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_a_run_is_told_of_with_its_best_and_its_last_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = line(300, 20.0) | {"env_steps_sampled": 340}  # with the episodes in progress
    summary = {"solved": True, "reason_for_stop": "solved", **last}
    first = line(150, 90.0, episodes=1)  # a short episode, the first one to end
    made(tmp_path / "one", [line(100, None), first, line(200, 30.0), last], summary)
    (run,) = listed(tmp_path, capsys)
    assert (run["name"], run["env"], run["algorithm"]) == ("one", "CartPole-v1", "impala")
    assert (run["state"], run["return_last"], run["return_best"]) == ("solved", 20.0, 30.0)
    assert (run["env_steps"], run["wall_time"], run["checkpoints"]) == (300, 3.0, [7])


def test_of_a_single_run_its_checkpoints_are_listed_with_the_best_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = made(tmp_path / "run", [line(100, 1.0)])
    days_ago = time.time() - 3.5 * 24 * 3600
    for where, update, returns in (("checkpoints", 9, [20.0, 40.0]), ("best", 8, [])):
        counters = {"trained": 1000 * update, "returns": returns}
        path = write(run_dir / where, checkpoint(update, counters=counters))
        os.utime(path, (days_ago, days_ago))
    (run_dir / "checkpoints" / "000000007").mkdir()
    assert main(["runs", str(run_dir)]) == 0
    _, _, told = capsys.readouterr().out.partition("\n\n")
    assert [each.split() for each in told.splitlines()] == [
        ["checkpoint", "return", "steps", "written"],
        [f"{run_dir}/checkpoints/000000007", "damaged"],
        [f"{run_dir}/checkpoints/000000009", "30.00", "9k", "3", "days", "ago"],
        [f"{run_dir}/best/000000008", "-", "8k", "3", "days", "ago"],
    ]
    assert main(["runs", str(tmp_path)]) == 0
    assert "best/" not in capsys.readouterr().out, "of several runs there would be too many"


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ({"solved": True, "reason_for_stop": "solved"}, "solved"),
        ({"solved": False, "reason_for_stop": "stop_steps"}, "stopped"),
        ({"solved": False, "reason_for_stop": "failed", "failure": "no learner"}, "failed"),
        (None, "killed"),
    ],
)
def test_the_state_says_how_a_run_ended(
    summary: dict[str, Any] | None, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, [line(100, 1.0)], summary)
    assert [run["state"] for run in listed(tmp_path, capsys)] == [state]


def test_a_run_of_this_host_whose_driver_was_killed_is_known_as_such_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its sockets' directory is gone; its last line is a moment old."""
    run_dir = made(tmp_path / "run", [line(100, 1.0)])
    os.utime(run_dir / "metrics.jsonl")
    told = {"host": socket.gethostname(), "addresses": [f"unix:{tmp_path}/gone/driver.sock"]}
    (run_dir / "driver.json").write_text(json.dumps(told))
    with (run_dir / "metrics.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [run["state"] for run in listed(tmp_path, capsys)] == ["running"]
    assert [run["state"] for run in listed(tmp_path, capsys)] == ["killed"]
    (run_dir / "driver.json").write_text(json.dumps({**told, "host": "another"}))
    os.utime(run_dir / "metrics.jsonl")
    assert [run["state"] for run in listed(tmp_path, capsys)] == ["running"]


def test_runs_are_listed_newest_first_also_those_of_directories_within(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "old", [line(100, 1.0)], old=300.0)
    made(tmp_path / "sweep" / "trial", [line(100, 1.0)], old=200.0)
    made(tmp_path / "new" / "trial", [line(100, 1.0)], old=100.0)
    (tmp_path / "loop").symlink_to(tmp_path)
    names = [run["name"] for run in listed(tmp_path, capsys)]
    assert names == [str(tmp_path / "new/trial"), str(tmp_path / "sweep/trial"), "old"]


def test_what_is_damaged_is_said_and_the_other_runs_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "good", [line(100, 1.0)])
    bad = made(tmp_path / "bad", [line(100, 2.0)])
    (bad / "config.toml").write_text("no toml")
    with (bad / "metrics.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"env_steps_sampled": 200, "wall_')
    (gone := made(tmp_path / "gone", []) / "metrics.jsonl").unlink()
    assert main(["runs", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "good" in said.out
    assert f"{gone.parent}: there is no metrics.jsonl" in said.err
    assert "config.toml is damaged" in said.err
    assert {run["name"]: run["env_steps"] for run in listed(tmp_path, capsys)} == {
        "good": 100,
        "bad": 100,
        "gone": 0,
    }


@pytest.mark.parametrize("lost", ["config.toml", "checkpoints", "metrics.jsonl"])
def test_a_run_that_has_lost_a_part_is_listed_with_what_is_missing(
    lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = made(tmp_path / "run", [line(100, 1.0)]) / lost
    (Path.unlink if part.is_file() else shutil.rmtree)(part)
    what = "directory checkpoints" if lost == "checkpoints" else lost
    for directory in (tmp_path, tmp_path / "run"):
        (run,) = listed(directory, capsys)
        assert (run["name"], run["problem"]) == ("run", f"there is no {what}")
        assert main(["runs", str(directory)]) == 0
        assert f"{tmp_path / 'run'}: there is no {what}" in capsys.readouterr().err


def test_a_directory_without_runs_and_one_that_is_not_there_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "there are no runs in runs" in capsys.readouterr().out
    assert main(["runs", "elsewhere"]) == 1
    assert "elsewhere does not exist" in capsys.readouterr().err
    for given in ("runs", "runs/", "./runs"):
        for command in ("runs", "watch"):
            assert main([command, given]) == 1
            assert "runs does not exist" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["runs", "file"]) == 1
    assert "file is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", "env = 'x'\nmodules = 3\n"),
        ("config.toml", "a" + ".a" * 20_000 + " = 1"),
        ("summary.json", '{"solved": tr'),
        ("summary.json", "[" * 100_000),
        ("metrics.jsonl", '{"env_steps_trained": ' + "9" * 400 + "}\n"),
        ("driver.json", '{"host": "here", "addresses": []}'),
        ("events.jsonl", None),  # a pipe, which would block
    ],
)
def test_what_a_directory_holds_concerns_its_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None
) -> None:
    made(tmp_path / "good", [line(100, 1.0)], {"solved": True}, old=1.0)
    file = made(tmp_path / "bad", [line(100, 5.0)]) / name
    file.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)
    good, bad = sorted(listed(tmp_path, capsys), key=lambda run: str(run["name"]), reverse=True)
    assert (good["name"], good["state"], good["problem"]) == ("good", "solved", "")
    assert bad["name"] == "bad"
    page = PageApplication([tmp_path], named=False)
    for path, query in (("runs", ""), ("run", f"id={_id_of(tmp_path / 'bad')}&detail=1")):
        status, content_told = _asked(page, f"/api/{path}", query)
        assert status == "200 OK", content_told


def test_a_directory_whose_name_is_no_utf_8_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / os.fsdecode(b"run-\xff"), [line(100, 1.0)])
    (run,) = listed(tmp_path, capsys)
    assert run["name"] == "run-?"
    status, _ = _asked(PageApplication([tmp_path], named=False), "/api/runs")
    assert status == "200 OK"


def _asked(page: PageApplication, path: str, query: str = "") -> tuple[str, bytes]:
    """The status and the content of an answer."""
    began: list[str] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": query}
    content = page(environ, lambda status, headers: began.append(status))
    return began[0], b"".join(content)


# `juggler train --list` shows what ships, with what, and what was seen of it.


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["train", "--list"]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_there_is_a_line_for_each_with_its_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = _lines(capsys)
    assert head.split()[:4] == ["name", "algorithm", "environment", "extra"]
    algorithms = [read_shipped(name).config.learner.algorithm for name in shipped_configs()]
    assert [line.split()[:2] for line in lines] == [
        list(pair) for pair in zip(shipped_configs(), algorithms, strict=True)
    ]


def test_the_extra_that_one_needs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    extras = {line.split()[0]: line.split()[3] for line in _lines(capsys)}
    assert extras["cartpole"] == extras["memory-cartpole"] == "-"
    assert extras["hopper"] == "mujoco"
    assert extras["kuhn-poker"] == "openspiel"
    assert extras["lunarlander"] == "box2d"
    assert extras["pong"] == extras["breakout"] == "atari"


def test_what_was_seen_is_told_and_what_was_not_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {
        "one": MedianResults(478.26, 459_123, 3.64, 3, "2 cores, AMD EPYC"),
        "two": MedianResults(-85.0, 1_234_567, 100.0, 1, "a laptop"),
        "three": None,
        "four": "wins 99 % (benchmarks/games.md)",
    }
    monkeypatch.setattr(train, "shipped_configs", lambda: [*seen])
    monkeypatch.setattr(
        train, "read_shipped", lambda name: ShippedConfig(name, RunConfig(), seen[name])
    )
    head, one, two, three, four = _lines(capsys)
    assert head.split()[-5:] == ["return", "steps", "seconds", "seen", "on"]
    assert one.split()[4:7] == ["478.3", "459k", "3.6"]
    assert one.endswith("2 cores, AMD EPYC; median of seeds 0 to 2")
    assert two.split()[4:7] == ["-85.0", "1235k", "100.0"]
    assert two.endswith("a laptop; seed 0")
    assert three.split()[4:] == ["-", "-", "-", "not", "tried", "in", "full"]
    assert four.split()[4:8] == ["-", "-", "-", "wins"]


# What `juggler status` makes of what a driver says.


LINE = {
    "wall_time": 83.0,
    "env_steps_sampled": 1000,
    "env_steps_trained": 900,
    "env_steps_dropped": {"stale": 60, "learner_lost": 30},
    "env_steps_in_flight": 10,
    "env_steps_lost_unreported": 0,
    "episodes": 0,
    "episode_return_mean": None,
    "steps_per_second": 100.0,
    "staleness_mean": 1.5,
    "weights_version": [1, 3],
}
STATUS = status_pb2.RunStatus(
    run_id="run1",
    env="CartPole-v1",
    algorithm="impala",
    phase="training",
    metrics=json.dumps(LINE),
    queues=status_pb2.Queues(),
    driver=status_pb2.Resources(),
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
        console.print(table(plain_status(STATUS), width))
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
    plain = json.loads(json.dumps(plain_status(STATUS)))
    assert plain.keys() == set(STATUS.DESCRIPTOR.fields_by_name)
    assert plain["metrics"] == LINE
    assert plain["staleness"]["counts"] == [1, 2, 1]
    assert plain["workers"][0]["worker_id"] == "envrunner-10"
    assert plain["workers"][1]["version"] is None


# The pictures that `juggler plot` draws.


def _line(steps: int, wall_time: float, **changes: Any) -> dict[str, Any]:
    return {
        "env_steps_sampled": steps,
        "wall_time": wall_time,
        "steps_per_second": 1000.0,
        "episode_return_mean": None if steps == 0 else steps / 10,
        "evaluation_return_mean": None,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        **changes,
    }


def _write(path: Path, lines: list[Any]) -> Path:
    path.mkdir(parents=True)
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


def _run(path: Path, lines: list[Any]) -> RunCurves:
    return read_run(_write(path, lines), path.name)


def test_a_run_is_drawn_into_its_directory(tmp_path: Path) -> None:
    run = _write(tmp_path / "run", [_line(1000 * i, float(i)) for i in range(10)])
    assert plot([run]) == run / "plot.png"
    assert juggler.plot(run)._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"
    content = (run / "plot.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width > height > 700


def test_a_picture_of_several_runs_goes_where_it_is_told_or_into_the_working_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [_write(tmp_path / name, [_line(1000, 1.0), _line(2000, 2.0)]) for name in "ab"]
    assert plot(runs, tmp_path / "both") == tmp_path / "both.png"
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert plot(runs) == Path("comparison.png")
    assert Path("comparison.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "a" / "plot.png").exists()
    assert capsys.readouterr().err == ""


def test_every_panel_shows_every_run_over_steps_and_over_time(tmp_path: Path) -> None:
    slow = _run(tmp_path / "slow", [_line(100 * i, float(i)) for i in range(200)])
    fast = _run(
        tmp_path / "fast", [_line(900 * i, float(i), steps_per_second=9e3) for i in range(90)]
    )
    figure = _figure([slow, fast])
    panels = figure.get_axes()
    labels = ["environment steps"] * 3 + ["training time (min)"] * 3
    assert [axes.get_xlabel() for axes in panels] == labels
    assert [axes.get_ylabel() for axes in panels[:3]] == [
        "mean return per episode",
        "throughput (steps/s)",
        "staleness (updates)",
    ]
    for axes, run in ((axes, run) for axes in panels for run in (slow, fast)):
        scale = 60 if axes.get_xlabel() == labels[-1] else 1
        key = "training_time" if scale == 60 else "env_steps_sampled"
        drawn = [np.asarray(line.get_xdata())[-1] for line in axes.get_lines()]
        assert run.column(key)[-1] / scale in drawn
    assert panels[1].get_ylim()[0] == 0
    assert panels[1].get_ylim()[1] > 9000  # the run drawn first does not set the scale
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["slow", "fast"]


def test_an_evaluation_is_one_point_however_many_lines_repeat_it(tmp_path: Path) -> None:
    values = [None, 5.0, 5.0, 7.0, 7.0]
    lines = [_line(i, float(i), evaluation_return_mean=value) for i, value in enumerate(values)]
    figure = _figure([_run(tmp_path / "run", lines)])
    points = figure.get_axes()[0].get_lines()[1]
    assert np.asarray(points.get_xdata()).tolist() == [1.0, 3.0]
    assert np.asarray(points.get_ydata()).tolist() == [5.0, 7.0]


def test_broken_lines_are_left_out_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = json.dumps(_line(3, 3.0)).replace("3.0", "9" * 400)
    lines = [
        _line(1, 1.0),
        '{"wall_time": 1.5, "env_st',
        "[1, 2]",
        "[" * 100_000,
        "",
        huge,
        _line(2, "soon"),  # type: ignore[arg-type]
        {"wall_time": 2.0},
        _line(4, 4.0, episode_return_mean="high"),
    ]
    run = _write(tmp_path / "run", lines)
    found = read_run(run, "run")
    assert found.column("env_steps_sampled").tolist() == [1.0, 4.0]
    assert np.isnan(found.column("episode_return_mean")[1])
    plot([run])
    assert "left out 7 lines of" in capsys.readouterr().err


def test_what_a_restored_run_does_again_counts_once(tmp_path: Path) -> None:
    before = [_line(100 * i, float(i)) for i in range(6)]
    again = [_line(100 * i, i - 3.0, staleness_mean=9.0) for i in range(3, 8)]
    column = _run(tmp_path / "run", before + again).column
    assert column("env_steps_sampled").tolist() == [0, 100, 200, 300, 300, 400, 500, 600, 700]
    assert column("training_time").tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert column("staleness_mean").tolist() == [0.5] * 4 + [9.0] * 5


@pytest.mark.parametrize(
    ("lines", "reason"),
    [([], "it is empty"), (["{", "?"], "none of its 2 lines"), ([""], "none of its 1 lines")],
)
def test_a_run_without_metrics_is_an_error(tmp_path: Path, lines: list[str], reason: str) -> None:
    run = _write(tmp_path / "run", lines)
    with pytest.raises(PlotError, match=reason) as raised:
        plot([run])
    assert str(run) in str(raised.value)
    assert not (run / "plot.png").exists()


def test_a_path_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"has no metrics\.jsonl"):
        plot([tmp_path])
    with pytest.raises(PlotError, match="is not a directory"):
        plot([tmp_path / "nowhere"])
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot read"):
        plot([tmp_path])
    with pytest.raises(PlotError, match="at least one"):
        plot([])


def _by_name(key: str, step: int, **means: float) -> dict[str, Any]:
    return {
        key: {
            name: {"episode_return_mean": mean * step, "evaluation_return_mean": None}
            for name, mean in means.items()
        }
    }


def _of_two(path: Path, **more: Any) -> Path:
    lines = [
        _line(
            100 * i,
            float(i),
            episode_return_mean=0.0,
            **_by_name("by_agent", i, a=1.0, b=-0.5, c=-0.5),
            **{key: make(i) for key, make in more.items()},
        )
        for i in range(5)
    ]
    return _write(path, lines)


def _curves(figure: Any) -> dict[str, list[float]]:
    """The curves of the first panel by their names in the legend."""
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    lines = [line for line in figure.get_axes()[0].get_lines() if line.get_label() == "training"]
    return {
        name: np.asarray(line.get_ydata()).tolist() for name, line in zip(names, lines, strict=True)
    }


def _modules(step: int) -> Any:
    return _by_name("by_module", step, hunter=1.0, prey=-0.5)["by_module"]


def test_a_run_of_several_modules_has_a_curve_for_each(tmp_path: Path) -> None:
    run = _of_two(tmp_path / "run", by_module=_modules)
    drawn = _curves(_figure([read_run(run, "run")], "auto"))
    assert drawn == {"hunter": [0, 1, 2, 3, 4], "prey": [0, -0.5, -1, -1.5, -2]}
    by_agent = _curves(_figure([read_run(run, "run")], "agent"))
    assert list(by_agent) == ["a", "b", "c"]
    figure = _figure([read_run(run, "run")])
    assert not figure.legends
    assert len(figure.get_axes()[1].get_lines()) == 1, "there is one throughput"


def test_several_runs_have_a_curve_for_each_module_where_that_is_asked(tmp_path: Path) -> None:
    runs = [_of_two(tmp_path / name, by_module=_modules) for name in ("one", "two")]
    read = [read_run(path, path.name) for path in runs]
    drawn = _curves(_figure(read, "module"))
    assert list(drawn) == ["one: hunter", "one: prey", "two: hunter", "two: prey"]
    assert plot(runs, tmp_path / "both.png", by="module").is_file()
    assert list(_curves(_figure(read))) == ["one", "two"]


def _of_losses(path: Path, *modules: str) -> Path:
    def told(i: int) -> dict[str, dict[str, float]]:
        return {name: {"policy_loss": i * 0.5 + at} for at, name in enumerate(modules)}

    return _write(path, [_line(100 * i, float(i), modules=told(i)) for i in range(6)])


def test_any_metrics_are_drawn_instead_of_the_usual_panels(tmp_path: Path) -> None:
    run = _of_losses(tmp_path / "run", "hunter", "prey")
    metrics = ["policy_loss", "staleness_mean", "modules/prey/policy_loss"]
    figure = juggler.plot(run, metrics=metrics).figure
    panels = figure.get_axes()
    assert [axes.get_ylabel() for axes in panels[:3]] == metrics
    hunter, prey = panels[0].get_lines()
    assert np.asarray(hunter.get_ydata()).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert np.asarray(prey.get_ydata()).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    (whole,) = panels[2].get_lines()
    assert np.asarray(whole.get_ydata()).tolist() == np.asarray(prey.get_ydata()).tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["hunter", "prey", "run"]


def test_a_metric_of_several_runs_is_a_curve_for_each_or_their_mean(tmp_path: Path) -> None:
    runs = [_of_losses(tmp_path / name, "default") for name in "ab"]
    figure = juggler.plot(*runs, metrics=["policy_loss"]).figure
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    together = juggler.plot(*runs, metrics=["policy_loss"], together=True).figure
    names = [line.get_label() for line in together.get_axes()[0].get_lines()]
    assert names == ["one run", "one run", "interquartile mean"]


def test_smoothed_curves_are_means_of_the_lines_up_to_each(tmp_path: Path) -> None:
    assert smoothed(np.array([1.0, 3.0, np.nan, 5.0, 9.0]), 3)[[0, 1, 3, 4]].tolist() == [
        1,
        2,
        4,
        7,
    ]
    for lines in (1, 5, 6, 100):
        assert smoothed(np.array([4.0, 4.0, np.nan, 4.0, 4.0]), lines)[4] == 4.0
    run = _of_losses(tmp_path / "run", "default")
    axes = juggler.plot(run, metrics=["policy_loss"], smooth=2).figure.get_axes()[0]
    (line,) = axes.get_lines()
    assert np.asarray(line.get_ydata()).tolist() == [0.0, 0.25, 0.75, 1.25, 1.75, 2.25]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"metrics": ["policy_lose"]}, "policy_lose"),
        ({"metrics": ["kl"], "by": "agent"}, "--by agent"),
        ({"smooth": 0}, "at least 1"),
    ],
)
def test_a_metric_that_cannot_be_drawn_is_an_error(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlotError, match=words):
        juggler.plot(_of_losses(tmp_path / "run", "default"), **wrong)


# What `juggler league` prints.


def player(name: str, parent: str = "") -> Player:
    role = "historical" if parent else "main"
    return Player(name, role, not parent, "initial", parent, "main", ready=True)


def test_all_that_learn_and_the_newest_copies_have_a_column() -> None:
    players = [player("a"), player("b"), *(player(f"a-v{n}", "a") for n in range(15))]
    payoffs = Payoffs(0.5, 4)
    for _ in range(4):
        payoffs.book("a", "b", 1)
    payoffs.book("a", "a-v14", 0)
    head, of_a, of_b, unsure, few, left_out = win_rate_lines(players, payoffs)
    assert head.split()[2:] == ["#1", "#2", *(f"#{n}" for n in range(6, 18))]
    assert of_a.split() == ["1", "a", "-", "100%±34", *["-"] * 11, "~50%±45"]
    assert of_b.split()[:4] == ["2", "b", "0%±34", "-"]
    assert len(head) == len(of_a) == len(of_b)
    assert unsure == "#: the player of that number; ±: half the width of the 95 % interval"
    assert few == "~: of fewer than 4 games"
    assert left_out.startswith("3 older frozen players")


def test_a_table_of_win_rates_that_is_too_wide_goes_on_below_itself() -> None:
    players = [player("a"), player("b"), *(player(f"a-v{n}", "a") for n in range(12))]
    payoffs = Payoffs(0.5, 4)
    payoffs.book("a", "a-v11", 1)
    whole = win_rate_lines(players, payoffs)[:3]
    *lines, _, _ = win_rate_lines(players, payoffs, columns=40)
    assert max(map(len, lines)) <= 40
    assert len(lines) > 4
    assert {*lines[3::4]} == {""}, "between two parts"
    width = len("wins of")
    again = [
        "".join([lines[row], *(part[width:] for part in lines[row + 4 :: 4])]) for row in range(3)
    ]
    assert again == whole


def test_columns_go_by_the_numbers_of_the_roster_so_that_long_names_make_none_wider() -> None:
    players = [player("main"), *(player(f"league_exploiter-0-v{n}", "main") for n in range(17))]
    payoffs = Payoffs(1.0, 1)
    for other in players[1:]:
        payoffs.book("main", other.player_id, 1)
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(roster(players, payoffs))
    head, *shown = captured.get().splitlines()
    assert head.split()[:2] == ["#", "player"]
    assert [line.split()[0] for line in shown] == [str(n) for n in range(1, 19)]
    table, *_ = win_rate_lines(players, payoffs, players)
    assert len(table) < 150
    numbers = [int(column.removeprefix("#")) for column in table.split()[2:]]
    assert [players[n - 1].player_id for n in numbers[-2:]] == [
        "league_exploiter-0-v15",
        "league_exploiter-0-v16",
    ]


@pytest.mark.parametrize(
    "arguments", [["--league", "rllib"], ["--league=rllib"], ["--league", '{"builder": "rllib"}']]
)
def test_a_builder_may_be_given_by_its_name(arguments: list[str]) -> None:
    config = parse(AgentsConfig, [*arguments, "--mapping", "none"], "train")
    assert config.league == {"builder": "rllib"}


# `juggler league RUN --tournament`: which player plays which agents, and which has won.


PLAYERS = [Player(name, "main", learning=True, source="initial") for name in ("a", "b", "c")]
#: What an agent gets in each match, by the player that plays it.
GETS = {"a": 1.0, "b": 0.8, "c": 0.2}


def config(agents: str, **league_keys: Any) -> RunConfig:
    players = ["main-0", "main-1"]
    return RunConfig.from_flat(
        {
            "env": "juggler:MatrixGame",
            "agents": dict.fromkeys(agents, players),
            "league": {"builder": "none", "options": {"mains": 2}, **league_keys},
        }
    )


@pytest.fixture
def league_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Of a run whose matches need no environment."""

    def play(
        path: Path, seated: Mapping[str, str], episodes: int, *_: Any, watch: Any, **__: Any
    ) -> Any:
        for ended in range(episodes + 1):
            watch(ended, 7)
        returns = {agent: GETS[who] for agent, who in seated.items()}
        return PlayedMatches(path, dict(seated), [PlayedMatch(returns, {})] * episodes, {}, [])

    monkeypatch.setattr(play_checkpoint, "play_matches", play)
    path = tmp_path / "run/checkpoints/1"
    return Checkpoint((1, 1), {}, {}, {}, {}, {}, path=path)


def test_teams_play_each_other_and_a_draw_is_within_the_margin(
    league_checkpoint: Checkpoint,
) -> None:
    teams = config("wxyz", teams=[["w", "y"], ["x", "z"]], draw_margin=0.5)
    payoffs = league._tournament(PLAYERS, league_checkpoint, teams, 4)
    assert [payoffs.games(*pair) for pair in ("ab", "ac", "bc")] == [4, 4, 4]
    assert payoffs.counts("a", "b") == (0, 4, 0)  # 2.0 and 1.6
    assert payoffs.counts("a", "c") == (4, 0, 0)
    assert payoffs.counts("c", "b") == (0, 0, 4)


def test_more_than_two_sides_are_told(league_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="teams"):
        league._tournament(PLAYERS, league_checkpoint, config("xyz"), 4)


def test_copies_are_among_those_who_can_be_named(league_checkpoint: Checkpoint) -> None:
    assert league_checkpoint.path is not None
    (league_checkpoint.path.parents[1] / "frozen" / "main-0-v1").mkdir(parents=True)
    told = "neither a module or a copy of this run .*: known are main-0, main-0-v1, random$"
    with pytest.raises(ConfigError, match=told):
        _policy("xyz", league_checkpoint.path, ("main-0",))
