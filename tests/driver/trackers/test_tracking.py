"""Trackers get a run's configuration, metrics and checkpoints, without delaying it."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.workers_world import WorkersWorld
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import juggler
from juggler.driver import trackers as module
from juggler.driver.callbacks import Evaluation, Run
from juggler.driver.config import RunConfig
from juggler.driver.driver_config import TENSORBOARD, TRACKERS
from juggler.driver.trackers import (
    MlflowTracker,
    TensorboardTracker,
    Tracker,
    Tracking,
    mlflow_name,
    tag_of,
    tracking,
)

LINE = {"env_steps_sampled": 40, "episode_return_mean": None, "modules/default/kl": 0.5, "x": [1]}


class Records(Tracker):
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.has_checkpoint = threading.Event()

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        self.told.append(("start", run_dir, config["env"], known_as))
        return "name-7"

    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        self.goes_on.wait(30)
        if self.fails:
            raise ConnectionError("no server there")
        self.told.append((dict(numbers), env_steps))

    def checkpoint(self, name: str, path: Path) -> None:
        if self.fails:
            raise ConnectionError("no server there")
        self.told.append((name, path.name, (path / "state").read_text()))
        self.has_checkpoint.set()

    def summary(self, summary: Mapping[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("no server there")
        self.told.append(summary.get("reason_for_stop"))

    def finish(self) -> None:
        self.told.append("finished")

    @property
    def checkpoints(self) -> list[tuple[str, str, str]]:
        return [each for each in self.told if each and each[0] in ("newest", "best")]


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path)


def run_of(world: WorkersWorld) -> Run:
    return world.parts.callbacks.run


def written(run: Run, name: str, state: str = "what was learned") -> Path:
    """A checkpoint in the run's directory."""
    path = run.run_dir / name
    path.mkdir(parents=True)
    (path / "state").write_text(state)
    return path


def test_a_tracker_gets_all_of_a_run_and_its_name_when_it_is_resumed(world: WorkersWorld) -> None:
    run = run_of(world)
    newest, best = written(run, "checkpoints/000000009"), written(run, "best/000000004")
    summary = {
        "reason_for_stop": "stop_steps",
        "checkpoint": str(newest),
        "best": {"checkpoint": str(best)},
    }
    for known_as in ("", "name-7"):
        records = Records()
        follows = Tracking({"mine": records})
        follows.on_start(run)
        follows.on_metrics(run, LINE)
        follows.on_end(run, summary)
        assert records.told == [
            ("start", run.run_dir, "CartPole-v1", known_as),
            ({"env_steps_sampled": 40, "modules/default/kl": 0.5}, 40),
            "stop_steps",
            ("newest", "000000009", "what was learned"),
            ("best", "000000004", "what was learned"),
            "finished",
        ]
    assert json.loads((run.run_dir / "trackers.json").read_text()) == {"mine": "name-7"}
    assert world.told.messages == []


def test_checkpoints_are_recorded_while_a_run_goes_on_and_may_be_deleted_meanwhile(
    world: WorkersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BYTES_A_SECOND", math.inf)
    run, records = run_of(world), Records()
    left = run.run_dir / ".tracked.tmp"  # by a driver that was killed
    left.mkdir()
    follows = Tracking({"mine": records})
    follows.on_start(run)
    assert not left.exists()
    for name, found in (("checkpoints/000000008", "newest"), ("best/000000004", "best")):
        path = written(run, name)
        records.has_checkpoint.clear()
        if found == "newest":
            follows.on_checkpoint(run, path)
        else:
            for is_best in (False, True):
                evaluation = Evaluation([1.0], [1], {}, 4, 40, is_best=is_best)
                follows.on_evaluation(run, evaluation)
        follows.on_metrics(run, LINE)
        assert records.has_checkpoint.wait(30), found
        assert records.checkpoints[-1] == (found, path.name, "what was learned")
    gone = written(run, "checkpoints/000000009")
    follows.on_checkpoint(run, gone)
    shutil.rmtree(gone)
    follows.on_metrics(run, LINE)
    best = {"checkpoint": str(run.run_dir / "best/000000004")}
    follows.on_end(run, {"checkpoint": str(written(run, "checkpoints/000000010")), "best": best})
    told = [(found, name) for found, name, _ in records.checkpoints]
    assert told == [("newest", "000000008"), ("best", "000000004"), ("newest", "000000010")]
    assert world.told.messages == []
    assert not left.exists()


def test_a_tracker_that_fails_is_told_of_once_and_others_go_on(world: WorkersWorld) -> None:
    fails, records = Records(), Records()
    fails.fails = True
    follows = Tracking({"bad": fails, "good": records})
    follows.on_start(run_of(world))
    for _ in range(3):
        follows.on_metrics(run_of(world), LINE)
    follows.on_end(run_of(world), {"reason_for_stop": "stopped", "checkpoint": None, "best": None})
    assert world.told.messages == ["bad: ConnectionError: no server there"]
    assert world.told.levels == ["warning"]
    assert len(records.told) == 6
    assert fails.told[-1] == "finished", "its end is told all the same"


def test_nobody_waits_for_a_tracker_that_hangs(
    world: WorkersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ("_END_SECONDS", "_REPORT_SECONDS"):
        monkeypatch.setattr(module, seconds, 0.05)
    monkeypatch.setattr(module, "_MOST_WAITING", 4)
    hangs = Records()
    hangs.goes_on.clear()
    follows = Tracking({"slow": hangs})
    follows.on_start(run_of(world))
    for _ in range(7):
        follows.on_metrics(run_of(world), LINE)
    assert world.told.messages == ["trackers are too slow: lines of metrics are left out"]
    follows.on_end(run_of(world), {"reason_for_stop": "stopped"})
    assert world.told.messages[1:] == [
        "waiting for slow; Ctrl-C leaves without",
        "trackers have not finished within 0 s",
    ]
    hangs.goes_on.set()
    assert follows._thread is not None
    follows._thread.join(30)
    assert hangs.told[-2:] == ["stopped", "finished"], "its end is told although too much waited"


def test_how_a_run_ended_is_recorded_though_its_last_checkpoints_take_too_long(
    world: WorkersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Records):
        begins, ends = threading.Event(), threading.Event()

        def checkpoint(self, name: str, path: Path) -> None:
            self.begins.set()
            self.ends.wait(30)

    for seconds in ("_END_SECONDS", "_REPORT_SECONDS"):
        monkeypatch.setattr(module, seconds, 0.05)
    monkeypatch.setattr(module, "_BYTES_A_SECOND", math.inf)
    run, slow = run_of(world), Slow()
    slow.goes_on.clear()
    follows = Tracking({"slow": slow})
    follows.on_start(run)
    path = written(run, "checkpoints/000000001")
    follows.on_checkpoint(run, path)
    follows.on_metrics(run, LINE)
    follows.on_end(run, {"reason_for_stop": "stopped", "checkpoint": str(path)})
    slow.goes_on.set()
    assert slow.begins.wait(30)
    assert slow.told[-1] == "stopped"
    slow.ends.set()
    assert follows._thread is not None
    follows._thread.join(30)
    assert slow.told[-1] == "finished"


def test_one_that_cannot_begin_ends_the_run(world: WorkersWorld) -> None:
    class Refuses(Records):
        def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
            raise PermissionError("log in")

    follows = Tracking({"mine": Refuses()})
    world.parts.callbacks.callbacks = [follows]
    world.parts.callbacks.start()
    assert isinstance(world.parts.callbacks.error, PermissionError)
    world.parts.callbacks.finish({})  # which waits for nothing
    assert world.told.messages == ["the callback Tracking.on_start raised PermissionError: log in"]


def test_names_are_checked_and_a_missing_package_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(juggler.ConfigError, match="unknown 'wandbb': did you mean 'wandb'"):
        RunConfig.from_flat({"track": ["wandbb"]})
    empty = cast(ModuleSpec, type("Namespace", (), {"origin": None}))
    for spec in (None, empty):  # wandb leaves directories of its name behind
        monkeypatch.setattr(module, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(juggler.ConfigError, match=r"wandb is missing: .* install .*\[wandb\]"):
            juggler.train("cartpole", track=["wandb"], run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert {*module._TRACKERS} == {*TRACKERS}
    assert tracking([]) == ()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("modules/default/policy_loss", "modules/default/policy_loss"),
        ("info/time (s)/mean", "info/time -s-/mean-"),  # an environment names its numbers
        ("by_agent/player[0]/return é", "by_agent/player-0-/return é-"),
        ("info/a//../b/mean", "info/a/-/-/b/mean-"),
        ("/x/.", "-/x/--"),
        ("x" * 300, f"{'x' * 241}-"),
    ],
)
def test_mlflow_gets_names_that_it_takes(key: str, name: str) -> None:
    """Checked with MLflow 3.17: it refuses all but the first name."""
    found = mlflow_name(key)
    digest = found.removeprefix(name)
    assert found == name + digest
    assert len(digest) == (0 if found == key else 8)  # which tells it from others


def test_mlflow_keeps_numbers_apart_whose_names_become_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Client:
        def __init__(self) -> None:
            self.told: list[Any] = []

        def log_batch(self, run_id: str, metrics: list[Any]) -> None:
            self.told += metrics

    client = Client()
    entities = SimpleNamespace(Metric=lambda name, value, now, step: (name, value))
    fake = SimpleNamespace(entities=entities, MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    tracker = MlflowTracker()
    numbers = {"info/speed[0]": 1.0, "info/speed(0)": 2.0, f"{'x' * 300}a": 3.0, f"{'x' * 300}b": 4}
    for _ in range(2):
        tracker.metrics(numbers, 7)
    first, second = client.told[:4], client.told[4:]
    assert first == second, "each number has one name"
    names = [name for name, _ in first]
    assert len({*names}) == 4
    assert [value for _, value in first] == [1.0, 2.0, 3.0, 4.0]
    assert all(mlflow_name(name) == name for name in names)


def lines_of_events(tracker: TensorboardTracker, *steps: int) -> None:
    for each in steps:
        tracker.metrics({"wall_time": each / 1000, "modules/default/kl": 0.5}, each)


def read_events(path: Path, tag: str = "time/wall_time") -> list[tuple[int, float]]:
    events = EventAccumulator(str(path)).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)]


def test_tensorboard_gets_the_lines_of_a_run_and_no_checkpoints(world: WorkersWorld) -> None:
    run = run_of(world)
    (follows,) = tracking([TENSORBOARD])
    follows.on_start(run)
    follows.on_checkpoint(run, written(run, "checkpoints/000000009"))
    for _ in range(2):
        follows.on_metrics(run, LINE)
    follows.on_end(run, {"checkpoint": str(run.run_dir / "checkpoints/000000009")})
    assert read_events(run.run_dir, "train/default/kl") == [(40, 0.5), (40, 0.5)]
    assert world.told.messages == []
    assert not (run.run_dir / "trackers.json").exists(), "it has no names for runs"


@pytest.fixture
def tensorboard(tmp_path: Path) -> Iterator[TensorboardTracker]:
    tracker = TensorboardTracker()
    assert tracker.start(tmp_path, {}, "") == ""
    yield tracker
    tracker.finish()


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("episode_return_mean", "rollout/episode_return_mean"),
        ("evaluation_return_mean", "rollout/evaluation_return_mean"),
        ("modules/hunter/policy_loss", "train/hunter/policy_loss"),
        ("staleness_mean", "train/staleness_mean"),
        ("steps_per_second", "time/steps_per_second"),
        ("env_steps_trained", "time/env_steps_trained"),
        ("info/score/mean", "info/score/mean"),
        ("custom/half", "custom/half"),
        ("by_module/hunter/episode_return_mean", "by_module/hunter/episode_return_mean"),
    ],
)
def test_tags_of_tensorboard_are_in_groups(key: str, tag: str) -> None:
    assert tag_of(key) == tag


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_the_disk_does_not_take_or_loses_begin_a_new_file(
    tensorboard: TensorboardTracker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines_of_events(tensorboard, 1000)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            lines_of_events(tensorboard, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines_of_events(tensorboard, 3000)
    # File by file: the counter that ends their names sorts ".10" before ".9".
    files = tmp_path.glob("events.out.tfevents.*")
    assert sorted(map(read_events, files)) == [[(1000, 1.0)], [(3000, 3.0)]]
    for each in tmp_path.glob("events.out.tfevents.*"):
        each.unlink()
    lines_of_events(tensorboard, 4000)
    assert read_events(tmp_path) == [(4000, 4.0)]
    assert capfd.readouterr().err == ""
