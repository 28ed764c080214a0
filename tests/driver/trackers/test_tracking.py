"""Trackers get a run's configuration, metrics and checkpoints, and hold up nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import pytest
from support.worker_events_world import WorkersWorld

import juggler
from juggler.driver.callbacks import Run
from juggler.driver.config import RunConfig
from juggler.driver.driver_config import TENSORBOARD, TRACKERS
from juggler.driver.trackers import tracking as module
from juggler.driver.trackers.mlflow_tracker import mlflow_name
from juggler.driver.trackers.tracking import Tracking, tracking

LINE = {"env_steps_sampled": 40, "episode_return_mean": None, "modules/default/kl": 0.5, "x": [1]}


class Records:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        self.told.append(("start", run_dir, config["env"], known_as))
        return "name-7"

    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        self.goes_on.wait(30)
        if self.fails:
            raise ConnectionError("nobody there")
        self.told.append((dict(numbers), env_steps))

    def finish(self, summary: Mapping[str, Any], checkpoints: Mapping[str, Path]) -> None:
        self.told.append((summary.get("reason_for_stop"), checkpoints))


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path)


def run_of(world: WorkersWorld) -> Run:
    return world.parts.callbacks.run


def test_a_tracker_gets_all_of_a_run_and_its_name_when_it_is_resumed(world: WorkersWorld) -> None:
    run = run_of(world)
    summary = {
        "reason_for_stop": "stop_steps",
        "checkpoint": "run/checkpoints/000000009",
        "best": {"checkpoint": "run/best/000000004"},
    }
    for known_as in ("", "name-7"):
        records = Records()
        follows = Tracking({"mine": records})
        follows.on_start(run)
        follows.on_metrics(run, LINE)
        follows.on_end(run, summary)
        checkpoints = {
            "newest": Path("run/checkpoints/000000009"),
            "best": Path("run/best/000000004"),
        }
        assert records.told == [
            ("start", run.run_dir, "CartPole-v1", known_as),
            ({"env_steps_sampled": 40, "modules/default/kl": 0.5}, 40),
            ("stop_steps", checkpoints),
        ]
    assert json.loads((run.run_dir / "trackers.json").read_text()) == {"mine": "name-7"}
    assert world.told.messages == []


def test_a_tracker_that_fails_is_told_of_once_and_others_go_on(world: WorkersWorld) -> None:
    fails, records = Records(), Records()
    fails.fails = True
    follows = Tracking({"bad": fails, "good": records})
    follows.on_start(run_of(world))
    for _ in range(3):
        follows.on_metrics(run_of(world), LINE)
    follows.on_end(run_of(world), {"reason_for_stop": "stopped", "checkpoint": None, "best": None})
    assert world.told.messages == ["bad: ConnectionError: nobody there"]
    assert world.told.levels == ["warning"]
    assert len(records.told) == 5
    assert fails.told[-1] == ("stopped", {}), "its end is told all the same"


def test_nobody_waits_for_a_tracker_that_hangs(
    world: WorkersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ("_END_SECONDS", "_TELL_SECONDS"):
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
    assert hangs.told[-1][0] == "stopped", "its end is told although too much waited"


def test_one_that_began_is_finished_where_another_cannot_begin(world: WorkersWorld) -> None:
    class Refuses(Records):
        def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
            raise PermissionError("log in")

    begun = Records()
    with pytest.raises(PermissionError):
        Tracking({"good": begun, "mine": Refuses()}).on_start(run_of(world))
    assert begun.told[-1] == (None, {})


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
    assert tracking([TENSORBOARD]) == ()
    assert {TENSORBOARD, *module._TRACKERS} == {*TRACKERS}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("modules/default/policy_loss", "modules/default/policy_loss"),
        ("info/time (s)/mean", "info/time -s-/mean"),  # an environment names its numbers
        ("by_agent/player[0]/return é", "by_agent/player-0-/return é"),
        ("info/a//../b/mean", "info/a/-/-/b/mean"),
        ("/x/.", "-/x/-"),
        ("x" * 300, "x" * 250),
    ],
)
def test_mlflow_gets_names_that_it_takes(key: str, name: str) -> None:
    """Tried with MLflow 3.17, which refuses those on the left but the first."""
    assert mlflow_name(key) == name
