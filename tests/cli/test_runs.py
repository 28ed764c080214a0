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
from support.disk import without_locks
from support.made_checkpoints import checkpoint
from support.made_runs import append, line, made

from juggler.cli import main
from juggler.cli.runs import duration
from juggler.driver.record.checkpoints import write
from juggler.driver.watching.overview import Overseer
from juggler.driver.watching.serving import PageApplication, _id_of


def listed(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["runs", str(directory), "--json"]) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_a_run_is_told_of_with_its_best_and_its_last_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = line(300, 20.0) | {"env_steps_sampled": 340}  # with those that are under way
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


def test_a_run_of_few_episodes_has_no_better_return_than_its_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "one", [line(100, 90.0, episodes=1), line(200, 30.0, episodes=9)])
    (run,) = listed(tmp_path, capsys)
    assert (run["return_last"], run["return_best"]) == (30.0, 30.0)


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
    summary: dict[str, Any] | None,
    state: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made(tmp_path, [line(100, 1.0)], summary)
    assert [run["state"] for run in listed(tmp_path, capsys)] == [state]


def test_a_summary_of_before_a_resume_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, [line(100, 1.0)], {"solved": True})
    os.utime(tmp_path / "metrics.jsonl")
    assert [run["state"] for run in listed(tmp_path, capsys)] == ["running"]


def test_a_run_goes_on_while_its_driver_listens_and_is_killed_when_it_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = made(tmp_path / "run", [line(100, 1.0)], old=1000.0)  # the driver stands still
    address = tmp_path / "driver.sock"
    (run_dir / "driver.json").write_text(json.dumps({"addresses": [f"unix:{address}"]}))
    with socket.socket(socket.AF_UNIX) as driver:
        driver.bind(str(address))
        driver.listen()
        assert [run["state"] for run in listed(tmp_path, capsys)] == ["running"]
    os.utime(run_dir / "metrics.jsonl")  # a moment ago
    assert [run["state"] for run in listed(tmp_path, capsys)] == ["killed"]


def test_a_run_of_this_host_whose_driver_was_killed_is_known_as_such_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory of its sockets is gone, and its last line was written a moment ago."""
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


def test_a_killed_run_of_this_host_ends_also_on_a_file_system_without_locks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(tmp_path / "run", [line(100, 1.0)], old=1000.0)
    told = {"host": socket.gethostname(), "addresses": [f"unix:{tmp_path}/gone/driver.sock"]}
    (run_dir / "driver.json").write_text(json.dumps(told))
    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert [run["state"] for run in listed(tmp_path, capsys)] == ["killed"]
    os.utime(run_dir / "metrics.jsonl")  # a moment ago
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


@pytest.mark.parametrize("only", ["config.toml", "checkpoints", "metrics.jsonl"])
def test_a_directory_with_one_thing_like_that_of_a_run_is_none(
    only: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in made(tmp_path / "other", [line(100, 1.0)]).iterdir():
        if part.name != only:
            (Path.unlink if part.is_file() else shutil.rmtree)(part)
    assert listed(tmp_path, capsys) == []


@pytest.mark.parametrize("text", ['{"solved": tr', "[1]"])
def test_a_damaged_summary_is_told(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, [line(100, 1.0)], {"solved": True})
    summary = tmp_path / "summary.json"
    summary.write_text(text)
    (run,) = listed(tmp_path, capsys)
    assert run["problem"].startswith("summary.json is damaged: ")


def test_a_directory_without_runs_and_one_that_is_not_there_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "there are no runs in runs" in capsys.readouterr().out
    assert main(["runs", "elsewhere"]) == 1
    assert "elsewhere does not exist" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["runs", "file"]) == 1
    assert "file is a file" in capsys.readouterr().err


def test_a_run_that_is_over_is_read_once_until_it_changes(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run", [line(100, 1.0)], {"solved": True})
    overseer = Overseer(run_dir, "run")
    first = overseer.look()
    assert overseer.look() is first
    append(run_dir, line(200, 2.0))  # it goes on
    assert (overseer.look().state, overseer.look().env_steps) == ("running", 200)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (172_799.0, "47 h 59 min"),
        (172_860.0, "2 days"),
    ],
)
def test_a_time_is_rounded_before_it_is_split(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def _damaged(run_dir: Path, name: str, content: bytes | str) -> None:
    file = made(run_dir, [line(100, 5.0)]) / name
    file.unlink(missing_ok=True)
    if content == "pipe":
        os.mkfifo(file)
    elif content == "hole":
        file.touch()
        os.truncate(file, 1 << 40)
    elif content == "directory":
        file.mkdir(parents=True)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


DAMAGES = {
    "checkpoint of another digit": ("checkpoints/²", "directory"),
    "checkpoint of 200 digits": ("checkpoints/" + "9" * 200, "directory"),
    "modules that are a number": ("config.toml", "env = 'x'\nmodules = 3\n"),
    "modules that are numbers": ("config.toml", "env = 'x'\nmodules.a = 3\n"),
    "goal of 400 digits": ("config.toml", "stop_return = 0x" + "f" * 400),
    "long key": ("config.toml", "a" + ".a" * 20_000 + " = 1"),
    "no UTF-8": ("config.toml", b"env = '\xff'"),
    "half a letter": ("summary.json", '{"reason_for_stop": "\\ud800", "\\ud800": 1}'),
    "return of 400 digits": ("summary.json", '{"episode_return_mean": ' + "9" * 400 + "}"),
    "steps of 400 digits": ("metrics.jsonl", '{"env_steps_trained": ' + "9" * 400 + "}\n"),
    "nested": ("summary.json", "[" * 100_000),
    "nested tables": ("summary.json", '{"a":' * 900 + "1" + "}" * 900),
    "driver without addresses": ("driver.json", '{"host": "here", "addresses": []}'),
    "driver that is a zero": ("driver.json", '{"host": "here", "addresses": ["unix:\\u0000"]}'),
    **{f"{name} is a {what}": (name, what)
       for name in ("config.toml", "metrics.jsonl", "summary.json", "driver.json", "events.jsonl")
       for what in ("pipe", "hole")},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_directory_holds_concerns_its_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    made(tmp_path / "good", [line(100, 1.0)], {"solved": True}, old=1.0)
    _damaged(tmp_path / "bad", *DAMAGES[damage])
    good, bad = sorted(listed(tmp_path, capsys), key=lambda run: str(run["name"]), reverse=True)
    assert (good["name"], good["state"], good["problem"]) == ("good", "solved", "")
    assert bad["name"] == "bad"
    assert main(["runs", str(tmp_path)]) == 0
    page = PageApplication([tmp_path], named=False)
    for path, query in (("runs", ""), ("run", f"id={_id_of(tmp_path / 'bad')}&detail=1")):
        status, content = _asked(page, f"/api/{path}", query)
        assert status == "200 OK", content
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
