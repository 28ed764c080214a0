"""Run directories: what they hold, and what is said of them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import tomllib
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changes import SkippedTime
from support.made_files import Disk

from juggler.driver.reporting import run_directory
from juggler.driver.reporting.progress import PlainProgress
from juggler.driver.reporting.run_directory import (
    CONFIG_FILE,
    RunDirectory,
    RunDirectoryError,
    announce,
    find_driver,
    find_driver_from_elsewhere,
    must_be_free,
)

CONFIG = {
    "env": "CartPole-v1",
    "lr": 1e-3,
    "stop_steps": None,
    "hidden": [64, 64],
    "env_kwargs": {"size": None},
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that finds a file locked tries again at once."""
    monkeypatch.setattr(run_directory, "time", SkippedTime())


def _line(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "wall_time": steps / 1000,
        "env_steps_sampled": steps,
        "env_steps_dropped": {"stale": 3},
        "weights_version": [1, 2],
        "episode_return_mean": None,
        "seconds": {"learner": {"update": 0.5}},
        "modules": {"default": {"policy_loss": -0.25}},
        **changes,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_new_run_directory_holds_the_configuration(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path / "a" / "run", CONFIG, "cartpole")) as run:
        assert run.path == tmp_path / "a" / "run"
        assert run.checkpoints == run.path / "checkpoints"
        assert run.checkpoints.is_dir()
    found = tomllib.loads((run.path / "config.toml").read_text())
    none = {key: "none" for key, value in CONFIG.items() if value is None}
    assert none
    assert found == {"env": "CartPole-v1", "lr": 1e-3, "hidden": [64, 64], "env_kwargs": {}, **none}


def test_a_configuration_that_toml_cannot_hold_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="TOML"):
        RunDirectory.create(tmp_path / "run", {"env_kwargs": {"sizes": [None]}}, "cartpole")
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory_is_named_after_the_run_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(3):
        with closing(RunDirectory.create(None, CONFIG, "ALE/Pong-v5: first")) as run:
            paths.append(run.path)
    assert len(set(paths)) == 3
    for path in paths:
        assert path.parent == tmp_path / "runs", "absolute: a script may go elsewhere meanwhile"
        assert re.fullmatch(r"ALE-Pong-v5-first-\d{8}-\d{6}(-\d)?", path.name)


def test_an_empty_directory_is_taken_and_a_full_one_is_not(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")):
        with pytest.raises(RunDirectoryError) as while_it_goes_on:
            RunDirectory.create(tmp_path, CONFIG, "cartpole")
        told = str(while_it_goes_on.value)
        assert "may still be writing" in told
        assert "delete" not in told
    before = sorted(tmp_path.iterdir())
    nothing = "not empty, and has no checkpoint to resume from; name another, or delete this one"
    with pytest.raises(RunDirectoryError, match=nothing):
        RunDirectory.create(tmp_path, CONFIG, "cartpole")
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "file", CONFIG, "cartpole")
    with pytest.raises(RunDirectoryError, match="cannot make"):
        RunDirectory.create(tmp_path / "file" / "run", CONFIG, "cartpole")


def test_lines_are_valid_json_whatever_the_numbers(tmp_path: Path) -> None:
    values = [np.float32("nan"), np.float64(0.5), float("-inf"), np.int64(3), np.array([1, np.nan])]
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(np.int64(7), values=values))  # type: ignore[arg-type]
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(text, parse_constant=refuse)
    assert found["values"] == [None, 0.5, None, 3, [1.0, None]]
    assert found["env_steps_sampled"] == 7


def test_a_run_that_goes_on_appends_after_the_last_whole_line(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"wall_time": 3.0, "env_st')
    with closing(RunDirectory.open(tmp_path, CONFIG)) as run:
        run.append(_line(1500))
    assert _lines(tmp_path) == [_line(1000), _line(1500)]


@pytest.mark.parametrize(("name", "reason"), [("nowhere", "not a directory"), ("", "config.toml")])
def test_only_a_run_directory_can_be_opened(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(RunDirectoryError, match=reason):
        RunDirectory.open(tmp_path / name, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_cannot_write_in_one_run_directory(tmp_path: Path) -> None:
    with (
        closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")),
        pytest.raises(RunDirectoryError, match="another process"),
    ):
        RunDirectory.open(tmp_path, CONFIG)
    RunDirectory.open(tmp_path, CONFIG).close()


def test_a_disk_that_takes_no_more_leaves_whole_lines_and_is_told_once(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    shown = StringIO()
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        progress = PlainProgress(shown)
        run.write_line(_line(1000), progress)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            for _ in range(2):
                run.write_line(_line(2000, padding="x" * 2000), progress)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert _lines(tmp_path) == [_line(1000)]
        run.write_line(_line(3000), progress)
    assert _lines(tmp_path) == [_line(1000), _line(3000)]
    why = f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"
    assert shown.getvalue().splitlines() == [
        f"error: cannot write metrics in {tmp_path}: {why}",
        f"metrics are written in {tmp_path} again",
    ]


def test_a_summary_replaces_the_one_before_it_and_leaves_nothing_beside(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.write_summary({"solved": False})
        run.write_summary({"solved": True, "loss": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"solved": True, "loss": None}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "summary.json", "checkpoints"}


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, "x").discard()
    assert list(tmp_path.iterdir()) == []


# Run directories that are taken, gone, or of a run that has ended.


@pytest.mark.parametrize("command", ["train", "driver"])
def test_a_directory_with_a_checkpoint_says_how_its_run_goes_on(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "checkpoints" / "000000001").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=f"not empty; .*juggler {command} --resume "):
        must_be_free(tmp_path, command)


def test_the_directory_of_a_live_run_is_not_offered_for_resuming(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "000000001").mkdir(parents=True)
    with (tmp_path / "metrics.jsonl").open("wb") as metrics:
        fcntl.flock(metrics, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match=r"still be writing") as wrong:
            must_be_free(tmp_path)
    assert "--resume" not in str(wrong.value)


def test_a_directory_that_cannot_be_made_is_told_before_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "runs" / "one", Path("/proc/self/one"), None):
        with pytest.raises(RunDirectoryError, match=f"cannot make the run directory {path or ''}"):
            must_be_free(path)


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_before_all_else_and_nothing_is_left_there(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path / "disk")
    run_dir = disk.path / "run"
    try:
        disk.fill(os.getpid())
        with pytest.raises(RunDirectoryError, match=r"the run directory .*/run: [^\[]+$"):
            must_be_free(run_dir)
        disk.empty(os.getpid())
        must_be_free(run_dir)
        assert list(disk.path.iterdir()) == []
    finally:
        disk.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text("")
    return tmp_path


def test_a_driver_that_listens_everywhere_is_found_at_its_host(run_dir: Path) -> None:
    assert announce(run_dir, "run", ["unix:/x", "0.0.0.0:5005"]) == ""
    assert find_driver(run_dir) == "unix:/x"
    assert find_driver_from_elsewhere(run_dir, 0.0) == f"{socket.gethostname()}:5005"


def test_a_driver_that_takes_no_workers_is_told(run_dir: Path) -> None:
    announce(run_dir, "run", ["unix:/x"])
    with pytest.raises(RunDirectoryError, match="takes"):
        find_driver_from_elsewhere(run_dir, 0.0)


@pytest.mark.parametrize(
    ("summary", "how"),
    [
        (None, "it was killed, or is starting$"),
        ('{"solved": true, "reason_for_stop": "solved"}', "it is solved; .*summary.json has more"),
        ('{"solved": false, "reason_for_stop": "stop_steps"}', r"it ended \(stop_steps\); .*"),
        ("{", "see .*summary.json for how it ended"),
    ],
)
def test_a_run_without_a_driver_is_told(run_dir: Path, summary: str | None, how: str) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("")
    if summary:
        (run_dir / "summary.json").write_text(summary)
    with pytest.raises(RunDirectoryError, match=f"is not running: .*{how}"):
        find_driver_from_elsewhere(run_dir, 0.0)
    os.utime(metrics, (1e10, 1e10))  # the run was resumed since
    with pytest.raises(RunDirectoryError, match=r"it was killed, or is starting$"):
        find_driver_from_elsewhere(run_dir, 0.0)


# A run whose directory is deleted or moved while it trains makes it again, unless it is taken.


@pytest.mark.parametrize("how", ["deleted", "moved", "only the file"])
def test_a_directory_that_is_gone_is_made_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    with closing(RunDirectory.create(path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        assert not run.renew()
        if how == "deleted":
            shutil.rmtree(path)
        elif how == "moved":
            path.rename(tmp_path / "moved")
        else:
            (path / "metrics.jsonl").unlink()
        assert run.renew()
        run.append(_line(2000))
        assert not run.renew()
        with pytest.raises(RunDirectoryError, match="another process"):
            RunDirectory.open(path, CONFIG)
    assert _lines(path) == [_line(2000)]
    assert tomllib.loads((path / "config.toml").read_text())["lr"] == 1e-3
    assert run.checkpoints.is_dir()
    RunDirectory.open(path, CONFIG).close()


def test_a_directory_that_cannot_be_made_again_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    with closing(RunDirectory.create(path, CONFIG, "cartpole")) as run:
        shutil.rmtree(path.parent)
        path.parent.touch()
        with pytest.raises(RunDirectoryError, match=r"cannot be made again|cannot read"):
            run.renew()
        path.parent.unlink()
        assert run.renew()


def test_a_directory_that_another_run_has_taken_stays_as_that_run_has_it(tmp_path: Path) -> None:
    path, shown = tmp_path / "run", StringIO()
    with closing(RunDirectory.create(path, CONFIG, "first")) as run:
        progress = PlainProgress(shown)
        run.write_line(_line(1000), progress)
        shutil.rmtree(path)
        with closing(RunDirectory.create(path, {"lr": 2.0}, "second")) as other:
            other.append(_line(7))
            renewed = [run.write_line(_line(steps), progress) for steps in (2000, 3000)]
            assert renewed == [False, False]
            assert _lines(path) == [_line(7)]
            assert tomllib.loads((path / "config.toml").read_text()) == {"lr": 2.0}
            told = (
                f"error: the run directory {path} was deleted or moved, and another run has taken "
                "it: metrics and checkpoints of this run are lost\n"
            )
            assert shown.getvalue() == told, "once"
            with pytest.raises(RunDirectoryError, match="summary"):
                run.write_summary({})
        assert not run.write_line(_line(3500), progress), "nor does it take what that run has left"
        assert run.taken
        assert not (path / "summary.json").exists()
        shutil.rmtree(path)
        assert run.write_line(_line(4000), progress), "the run has its directory again"
    assert _lines(path) == [_line(4000)]
    assert tomllib.loads((path / "config.toml").read_text())["env"] == CONFIG["env"]
