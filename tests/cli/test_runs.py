"""`juggler runs`: which runs there are, and what became of each."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.made_files import checkpoint, line, made

from juggler.cli import main, train
from juggler.cli.status import table
from juggler.driver.config import RunConfig
from juggler.driver.config_files import MedianResults, ShippedConfig, read_shipped, shipped_configs
from juggler.driver.monitoring import plain_status
from juggler.driver.watching.page_server import PageApplication, _id_of
from juggler.runtime.checkpoints.checkpoint import write
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
    page.close()


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
    return capsys.readouterr().out.splitlines()


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


def test_what_was_seen_is_told_and_what_was_not_too(monkeypatch: pytest.MonkeyPatch) -> None:
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
    head, one, two, three, four = train.listing().splitlines()
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
