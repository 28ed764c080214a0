"""What `juggler evaluate` says of the episodes that it has played."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.place import status_of

from juggler.cli import tune
from juggler.cli.tune import Timed, search
from juggler.driver import play_checkpoint
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.driver import RunFailed
from juggler.driver.play_checkpoint import Demonstrations, Evaluated
from juggler.driver.reporting.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ([480.0] * 5, ["mean return: 480.0 to 480.0 (95 % interval)"]),
        ([480.0] * 4, []),
        ([480.0], []),
    ],
)
def test_few_episodes_have_a_return_and_no_interval(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    returns: list[float],
    told: list[str],
) -> None:
    played = Evaluated(Path("run/checkpoints/1"), returns, [480] * len(returns), [])
    monkeypatch.setattr(play_checkpoint, "evaluate", lambda *_, **__: played)
    assert status_of("evaluate", "run", "--episodes", len(returns)) == 0
    said = capsys.readouterr().out
    assert ("1 episode: return " in said) == (len(returns) == 1)
    assert ("± 0.0 (standard deviation; min 480.0" in said) == (len(returns) > 1)
    assert [each for each in said.splitlines() if "interval" in each] == told


@pytest.mark.parametrize(
    "option", ["--env CartPole-v1", "--video films", "--play red=random", "--explore"]
)
def test_simulators_are_not_filmed_play_no_matches_and_do_not_explore(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("evaluate", "run", "--simulator", "./game {address}", *option.split()) == 2
    assert "--simulator: cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_actions_may_be_drawn(
    command: str, explore: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def play(*_: Any, **how: Any) -> Demonstrations:
        asked.update(how)
        return Demonstrations(tmp_path, [1.0], [1], [], dataset=tmp_path)

    monkeypatch.setattr(play_checkpoint, command, play)
    assert status_of(command, "run", *["--explore"] * explore) == 0
    assert asked["explore"] is explore


@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_seeds_are_not_negative(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(command, "run", "--seed", "-1") == 2
    assert "seed = -1: must be at least 0" in capsys.readouterr().err


def test_json_is_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def play(*_: object, **__: object) -> Evaluated:
        print("step 1")
        os.write(1, b"step 2, in C\n")
        returns = {("left", "main"): [1.0, math.nan]}
        return Evaluated(Path("run/checkpoints/1"), [1.0, 3.0], [5, 6], [Path("a.mp4")], returns)

    monkeypatch.setattr(play_checkpoint, "evaluate", play)
    assert status_of("evaluate", "run", "--json") == 0
    captured = capfd.readouterr()
    said = json.loads(captured.out)
    assert (said["mean"], said["returns"], said["interval"]) == (2.0, [1.0, 3.0], None)
    assert (said["checkpoint"], said["videos"]) == ("run/checkpoints/1", ["a.mp4"])
    assert said["agent_returns"] == [{"agent": "left", "module": "main", "returns": [1.0, None]}]
    assert "step 1" in captured.err
    assert "step 2" in captured.err


def test_episodes_that_do_not_end_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_checkpoint, "_MANY_STEPS", 10)
    seen: list[tuple[int, int]] = []
    watch = play_checkpoint.warns_of_endless(lambda *said: seen.append(said))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, 10):
            watch(0, step)
        watch(1, 10)
        assert not told
        for step in range(11, 50):
            watch(1, step)
    (warned,) = told
    assert "no episode has ended in 10 steps" in str(warned.message)
    assert "TimeLimit" in str(warned.message)
    assert len(seen) == 49


# `juggler tune`: which sizes it tries, and what it makes of the speeds of short runs.


Rate = Callable[[dict[str, Any]], float]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rate], list[dict[str, int]]]:
    """Replace runs by their rates by size; return the sizes tried."""

    def with_rates(rate: Rate) -> list[dict[str, int]]:
        tried: list[dict[str, int]] = []

        def time_run(config: RunConfig, given: Collection[str], seconds: float) -> Timed:
            tried.append(Timed(config, 0.0, 0.0).sizes)
            return Timed(config, rate(config.flat()), 0.5)

        monkeypatch.setattr(tune, "time_run", time_run)
        for name in ("share_forkserver", "release_forkserver"):
            monkeypatch.setattr(f"juggler.runtime.actors.processes.{name}", lambda: None)
        return tried

    return with_rates


def best_of(rate: Rate, timed: Callable[[Rate], list[dict[str, int]]], **keys: Any) -> Timed:
    timed(rate)
    values = {"envs_per_runner": 4, "num_env_runners": 1, "batch_size": 2048, "fragment_steps": 32}
    return search(RunConfig.from_flat({**values, **keys}), frozenset(keys), 60.0)[1]


def test_a_size_grows_as_long_as_that_pays(timed: Any) -> None:
    best = best_of(lambda of: min(of["envs_per_runner"], 16) * of["num_env_runners"] ** 0.01, timed)
    assert (best.sizes["envs_per_runner"], best.sizes["num_env_runners"]) == (16, 1)


def test_a_batch_is_not_larger_than_an_update(timed: Any) -> None:
    def more(of: dict[str, Any]) -> float:
        return float(of["num_env_runners"] * of["envs_per_runner"])

    for synchronous in (True, False):
        best = best_of(more, timed, synchronous=synchronous, algorithm="ppo")
        rows = best.sizes["envs_per_runner"]
        rows *= best.sizes["num_env_runners"] if synchronous else 1
        assert rows * best.sizes["fragment_steps"] <= 1.1 * 2048
        assert best.sizes["fragment_steps"] >= 8
        assert best.rate > 16


def test_a_size_that_fails_is_reported_and_left(
    timed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def rate(of: dict[str, Any]) -> float:
        if of["num_env_runners"] > 2:
            raise RunFailed("no memory")
        return float(of["num_env_runners"])

    assert best_of(rate, timed).sizes["num_env_runners"] == 2
    assert "num_env_runners = 4 fails: no memory" in capsys.readouterr().err


def test_a_size_without_an_update_is_too_slow_and_has_not_failed(
    timed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def rate(of: dict[str, Any]) -> float:
        return 0.0 if of["num_env_runners"] > 2 else float(of["num_env_runners"])

    assert best_of(rate, timed).sizes["num_env_runners"] == 2
    said = capsys.readouterr().err
    assert "num_env_runners = 4 is too slow to measure in 5.0 s: give more --seconds" in said
    assert "fails" not in said
    with pytest.raises(ConfigError, match=r"no update in 5\.0 s: give more --seconds"):
        best_of(lambda of: 0.0, timed)


@pytest.mark.parametrize(
    ("end", "fails"),
    [
        ({"reason_for_stop": "stop_seconds", "restarts": 0}, False),
        ({"reason_for_stop": "stop_seconds", "restarts": 2}, True),
        ({"reason_for_stop": "no_envrunner", "restarts": 0}, True),
    ],
)
def test_a_run_without_an_update_has_failed_only_if_something_went_wrong(
    end: dict[str, Any], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_run(config: RunConfig, *_: Any) -> None:
        run_dir = Path(str(config.driver.run_dir))
        with closing(RunDirectory.create(run_dir, config.flat(), "run")) as directory:
            directory.write_summary(end)
        raise RunFailed("nothing was trained on")

    monkeypatch.setattr("juggler.driver.start_run.start_run", start_run)
    with pytest.raises(RunFailed) if fails else nullcontext():
        assert tune.time_run(RunConfig(), (), 1.0).rate == 0


@pytest.mark.usefixtures("local_workers")
@pytest.mark.slow
def test_it_times_real_runs_and_writes_what_train_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuned.toml"
    keys = ("--envs-per-runner", 2, "--fragment-steps", 8, "--batch-size", 64, "--lr", 0.01)
    given = ("--env", "CartPole-v1", "--algorithm", "dqn", *keys)
    assert status_of("tune", *given, "--seconds", 1, "--write", file) == 0
    said = capsys.readouterr()
    assert "2 × 2 environments, 8 steps: about " in said.err
    assert "as configured: 2 × 2 environments, 8 steps: about " in said.out
    assert f"juggler train {file}" in said.out
    config = load_config_and_keys(file)[0]
    assert config.learner.lr == 0.01
    assert config.learner.algorithm == "dqn"
    assert config.driver.stop_seconds is None, "the runs that were timed had one"
    # An existing file stays.
    before = file.read_bytes()
    assert status_of("tune", *given, "--seconds", 1, "--write", file) == 2
    assert "it already exists, and is not overwritten" in capsys.readouterr().err
    assert file.read_bytes() == before


# The project that `juggler new` writes.


FILES = {
    *(".gitignore", "README.md", "train.toml", "tests/test_environment.py"),
    *("heat/__init__.py", "heat/environment.py", "heat/module.py"),
}


def new(directory: Path) -> dict[str, str]:
    """The files of a new project, by their names."""
    assert status_of("new", directory) == 0
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in found}


def test_it_is_whole_and_has_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = new(tmp_path / "heat")
    assert files.keys() == FILES
    said = capsys.readouterr().out
    assert {name for name in FILES if f"{tmp_path}/heat/{name}\n" in said} == FILES
    assert "juggler train train.toml" in said
    assert not [name for name, text in files.items() if "my_project" in text]
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text)
    assert "from heat.environment import Thermostat" in files["tests/test_environment.py"]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heat").mkdir()
    (tmp_path / "heat" / "thesis.tex").write_text("years of work")
    assert status_of("new", tmp_path / "heat") == 1
    assert "already exists, and is not overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "heat").iterdir()] == ["thesis.tex"]
    (tmp_path / "living room" / "room").mkdir(parents=True)
    room = tmp_path / "living room" / "room"
    assert status_of("new", room) == 0, "an empty directory is as good as none"
    assert f"cd '{room}'" in capsys.readouterr().out


def test_a_project_is_not_written_again_and_one_within_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = new(tmp_path / "heat")
    monkeypatch.chdir(tmp_path / "heat")
    monkeypatch.syspath_prepend(tmp_path / "heat")  # as commands have it
    capsys.readouterr()
    for same in (".", "../heat"):
        assert status_of("new", same) == 1
        told = f"{same} is already a project: `juggler train train.toml` trains in it"
        assert told in capsys.readouterr().err
    assert status_of("new", "heat") == 1
    assert "heat already exists, and is not overwritten" in capsys.readouterr().err
    assert new(Path("parts/cold")).keys() == {name.replace("heat", "cold") for name in files}
    told = f"parts/cold is within another project, {tmp_path / 'heat'}"
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_its_commands_and_its_test_work_and_it_is_solved(tmp_path: Path) -> None:
    project = tmp_path / "heat"
    files = new(project)
    (block,) = re.findall(r"^```sh\njuggler train(.*?)^```$", files["README.md"], re.S | re.M)[:1]
    for line in f"juggler train{block}".splitlines():
        _, *command = shlex.split(line, comments=True)
        said = run(project, "-m", "juggler", *command)
        if command[0] == "train":
            assert "solved: return -" in said
    assert (project / "runs" / "first" / "plot.png").exists()
    assert "3 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def run(directory: Path, *arguments: str) -> str:
    """A Python program there, without what tests of Juggler are told."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=kept,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
