"""Callbacks and trackers get events; callbacks may change numbers."""

from __future__ import annotations

import errno
import itertools
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

import numpy as np
import pytest
from support.workers_world import WorkersWorld, answer_the_snapshot, play_a_round, synchronous
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import juggler
from juggler.driver import callbacks
from juggler.driver import trackers as module
from juggler.driver.callbacks import ChangedValues, Evaluation, Run, checked
from juggler.driver.checkpoint.snapshots import must_be_sound
from juggler.driver.config import RunConfig
from juggler.driver.driver_config import TENSORBOARD, TRACKERS
from juggler.driver.periodic_work import metrics_line
from juggler.driver.signals import SecondSignal
from juggler.driver.trackers import (
    MlflowTracker,
    TensorboardTracker,
    Tracker,
    Tracking,
    mlflow_name,
    tag_of,
    tracking,
)
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2


class Events(juggler.Callback):
    """Keeps what it is told: (method, arguments), oldest first."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_metrics(self, run: juggler.Run, metrics: Any) -> None:
        self.told.append(("metrics", metrics))

    def on_update(self, run: juggler.Run, module_id: str, metrics: Any) -> None:
        self.told.append(("update", module_id, run.updates, metrics))

    def on_checkpoint(self, run: juggler.Run, path: Path) -> None:
        self.told.append(("checkpoint", path))

    def on_worker_lost(self, run: juggler.Run, worker_id: str, reason: str) -> None:
        self.told.append(("lost", worker_id, reason))

    def on_end(self, run: juggler.Run, summary: Any) -> None:
        self.told.append(("end", summary))


class Fails(juggler.Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_metrics(self, run: juggler.Run, metrics: Any) -> None:
        raise self.error


def world_with(tmp_path: Path, *events: juggler.Callback) -> WorkersWorld:
    world = synchronous(tmp_path / "checkpoints")
    world.parts.callbacks.callbacks = events
    return world


def test_updates_checkpoints_and_lost_workers_are_told_between_turns(tmp_path: Path) -> None:
    events = Events()
    world = world_with(tmp_path, events)
    play_a_round(world)
    play_a_round(world)
    assert events.told == [], "only between two turns of the loop"
    world.parts.callbacks.deliver()
    assert events.told == [("update", "default", 2, {})] * 2
    answer_the_snapshot(world)
    (written,) = world.written.gather(timeout=30)
    world._loop._handle(written)
    world.leave(world.runner)
    world.parts.callbacks.deliver()
    assert events.told[2:] == [("checkpoint", written.path), ("lost", "envrunner-0", "gone")]


def test_an_update_whose_answer_never_came_is_told_when_its_learner_is_back(tmp_path: Path) -> None:
    events, world = Events(), WorkersWorld(tmp_path)
    world.parts.callbacks.callbacks = [events]
    world.leave(world.learner)
    learner = world.join("learner")
    ((command_id, _),) = world.asked(learner, training_pb2.AddModule)
    made = Version(1, 1).message()
    kept = [training_pb2.UpdateDone(version=made)] * 2
    ready = training_pb2.ModuleReady(handed_over=made, last_updates=kept)
    world.reply(learner, command_id, ready)
    world.parts.callbacks.deliver()
    assert [each for each in events.told if each[0] == "update"] == [("update", "default", 1, {})]


def test_metrics_are_flat(tmp_path: Path) -> None:
    events = Events()
    world = world_with(tmp_path, events)
    parts = world.parts
    parts.metrics.updated("learner-0", "default", {"default": {"lr": float("nan"), "kl": 0.5}})
    parts.callbacks.metrics(metrics_line(parts))
    assert parts.callbacks.run.metrics["modules/default/kl"] == 0.5
    parts.callbacks.deliver()
    ((_, metrics),) = events.told
    assert metrics["episode_return_mean"] is None
    assert metrics["modules/default/lr"] is None, "as in metrics.jsonl"
    assert metrics["env_steps_trained"] == parts.callbacks.run.env_steps_trained == 0


def test_a_number_of_a_callback_is_in_every_line_from_the_next_one_on(tmp_path: Path) -> None:
    world = world_with(tmp_path, Events())
    parts, run = world.parts, world.parts.callbacks.run
    assert "custom" not in metrics_line(parts)
    run.record("half", np.float32(0.5))
    run.record("custom/half", 0.25)  # the same number, by its whole name
    run.record("env_steps_trained", 1)  # not Juggler's own
    run.record("rewards/mean", float("nan"))
    line = metrics_line(parts)
    assert line["env_steps_trained"] == 0
    parts.callbacks.metrics(line)
    parts.callbacks.metrics(metrics_line(parts))
    told = {key: value for key, value in run.metrics.items() if key.startswith("custom/")}
    assert told == {"custom/half": 0.25, "custom/env_steps_trained": 1, "custom/rewards/mean": None}


@pytest.mark.parametrize(
    "name", ["", "custom/", "a//b", "a b", "é", "a/b/c/d/e", "x" * 65, "a\n", 3]
)
def test_a_name_that_a_tracker_may_refuse_is_refused(tmp_path: Path, name: Any) -> None:
    run = world_with(tmp_path).parts.callbacks.run
    with pytest.raises(ValueError, match="letters, digits"):
        run.record(name, 1.0)


@pytest.mark.parametrize("value", ["1.0", None, [1.0], np.zeros(2)])
def test_a_value_that_is_not_a_number_is_refused(tmp_path: Path, value: Any) -> None:
    run = world_with(tmp_path).parts.callbacks.run
    with pytest.raises(TypeError):
        run.record("half", value)


@pytest.mark.parametrize(
    "error", [KeyError("mine"), SystemExit("hopeless"), KeyboardInterrupt("hopeless")]
)
def test_what_a_callback_raises_ends_the_run_in_order_and_only_the_end_is_told_of(
    tmp_path: Path, error: BaseException
) -> None:
    events = Events()
    world = world_with(tmp_path, Fails(error), events)
    told = world.parts.callbacks
    told.metrics({"updates": 1})
    told.metrics({"updates": 2})
    told.deliver()
    assert told.error is error
    text = f"the callback Fails.on_metrics raised {type(error).__name__}: {error}"
    assert (world.parts.end.reason, world.parts.end.failure) == ("callback_failed", text)
    assert world.told.messages == [text]
    told.deliver()
    assert events.told == []
    told.finish({"updates": 2})
    assert events.told == [("end", {"updates": 2})]


def test_ctrl_c_after_the_run_leaves_at_once(tmp_path: Path) -> None:
    class Waits(juggler.Callback):
        def on_end(self, run: juggler.Run, summary: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    events = Events()
    with pytest.raises(KeyboardInterrupt):
        world_with(tmp_path, Waits(), events).parts.callbacks.finish({"updates": 1})
    assert events.told == []


def test_a_second_signal_during_a_callback_leaves_at_once(tmp_path: Path) -> None:
    told = world_with(tmp_path, Fails(SecondSignal())).parts.callbacks
    told.metrics({"updates": 1})
    with pytest.raises(SecondSignal):
        told.deliver()
    assert told.error is None


def test_a_slow_callback_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=7.0)

    class Slow(juggler.Callback):
        def on_metrics(self, run: juggler.Run, metrics: Any) -> None:
            pass

    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=clock.__next__))
    world = world_with(tmp_path, Slow())
    for _ in range(2):
        world.parts.callbacks.metrics({})
    world.parts.callbacks.deliver()
    (text,) = world.told.messages
    assert text.startswith("the callback Slow.on_metrics took 7.0 s")
    assert world.told.levels == ["warning"]


def test_a_run_can_be_stopped_for_any_reason_but_its_own(tmp_path: Path) -> None:
    stopped: list[str] = []
    world = world_with(tmp_path)
    run = juggler.Run(
        tmp_path,
        {},
        world.parts.core,
        world.told,
        stopped.append,
        world.parts.values,
        world.parts.metrics,
    )
    run.stop()
    run.stop("pruned")
    for reason in ("solved", "stop_steps", ""):
        with pytest.raises(ValueError, match="give your own reason"):
            run.stop(reason)
    assert stopped == ["stopped", "pruned"]


def test_what_is_no_callback_is_refused_with_what_to_do() -> None:
    class Misspelt(juggler.Callback):
        def on_metric(self, run: juggler.Run, metrics: Any) -> None:
            pass

    with pytest.raises(juggler.ConfigError, match=r"Misspelt\.on_metric: did you mean"):
        checked([Misspelt()])
    with pytest.raises(juggler.ConfigError, match=r"give an object of this class: Events\(\)"):
        checked([Events])  # type: ignore[list-item]
    with pytest.raises(juggler.ConfigError, match="give a list"):
        juggler.train("cartpole", callbacks=Events())  # type: ignore[arg-type]
    with pytest.raises(juggler.ConfigError, match=r"is not a juggler\.Callback"):
        juggler.resume("nowhere", callbacks=[print])  # type: ignore[list-item]
    with pytest.raises(juggler.ConfigError, match=r"did you mean callbacks=\[\.\.\.\]"):
        juggler.train("cartpole", callback=Events())


def test_a_callback_has_to_take_what_it_is_called_with() -> None:
    class Forgets(juggler.Callback):
        def on_metrics(self, run: juggler.Run) -> None:  # type: ignore[override]
            pass

    class TakesMore(juggler.Callback):
        def on_metrics(self, *all_of_it: Any) -> None:
            pass

        def on_end(self, run: juggler.Run, summary: Any, how: str = "in order") -> None:
            pass

    expected = r"Forgets\.on_metrics\(run.*\) -> .* has to take \(run, metrics\)"
    with pytest.raises(juggler.ConfigError, match=expected):
        checked([Forgets()])
    taken = TakesMore()
    assert checked([taken]) == (taken,)


# Numbers that a callback puts in the place of schedules, as updates tell learners of them.


def told(world: WorkersWorld) -> dict[str, float]:
    """What the newest update says."""
    _, update = world.asked(world.learner, training_pb2.Update)[-1]
    return dict(update.values)


def test_the_next_update_tells_learners_and_later_ones_repeat_it(tmp_path: Path) -> None:
    world = synchronous(tmp_path / "checkpoints")
    run = world.parts.callbacks.run
    play_a_round(world)
    assert told(world) == {}
    run.set("lr", np.float64(1e-3))
    run.set("entropy_coefficient", 0)
    play_a_round(world)
    assert told(world) == {"lr": 1e-3, "entropy_coefficient": 0.0}
    run.set("lr", None)
    answer_the_snapshot(world)
    (written,) = world.written.gather(timeout=30)
    world._loop._handle(written)
    world.turn()
    play_a_round(world)
    assert told(world) == {"entropy_coefficient": 0.0}, "lr is as the configuration has it again"


def test_a_checkpoint_has_them_unless_the_configuration_was_changed_since(tmp_path: Path) -> None:
    world = synchronous(tmp_path / "checkpoints")
    run = world.parts.callbacks.run
    run.set("lr", 1e-3)
    run.set("entropy_coefficient", 0.5, "default")
    play_a_round(world)
    play_a_round(world)
    answer_the_snapshot(world)
    (written,) = world.written.gather(timeout=30)
    checkpoint = read(written.path)
    must_be_sound(checkpoint)
    config = RunConfig.from_flat(checkpoint.config)
    both = {"lr": 1e-3, "entropy_coefficient": 0.5}
    trained = {"default": "default"}
    kept = ChangedValues(config, trained, checkpoint)
    assert kept.of("default", "default") == both
    assert kept.in_words() == "lr = 0.001, entropy_coefficient = 0.5 (default)"
    other = RunConfig.from_flat({**checkpoint.config, "lr": 7e-4})
    kept = ChangedValues(other, trained, checkpoint)
    assert kept.of("default", "default") == {"entropy_coefficient": 0.5}
    checkpoint.counters["values"] = {"": {"lr": "high"}}
    with pytest.raises(CheckpointError, match="counters are invalid"):
        must_be_sound(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gamma", 0.9), r"set\('gamma', 0.9\): this cannot"),
        (("lrr", 1e-3), r"^set\('lrr', 0.001\): did you mean 'lr'\?$"),
        (("lr", -1.0), r"set\('lr', -1.0\): lr = -1.0"),
        (("lr", True), "expected a number, or None"),
        (("lr", "1e-3"), "expected a number, or None"),
        (("entropy_coefficient", float("nan")), "expected a finite number"),
        (("lr", 1e-3, "defualt"), "no module 'defualt': did you mean"),
        (("lr_value", -1.0), "lr = -1.0: must be above 0"),
    ],
)
def test_what_cannot_change_is_refused_in_a_sentence(
    arguments: tuple[str, float, str], words: str
) -> None:
    optimizers = {"value": {"parameters": ["value_*"], "lr": 1e-3}}
    config = RunConfig.from_flat({"env": "CartPole-v1", "optimizers": optimizers})
    values = ChangedValues(config, {"default": "default"})
    with pytest.raises(ValueError, match=words):
        values.set(*arguments)
    assert values.of("default", "default") == {}
    assert values.to_state() == {}
    values.set("lr_value", 2e-3)
    assert values.of("default", "default") == {"lr_value": 2e-3}


def two_modules(of_b: dict[str, Any], value_lr: float = 1e-3) -> RunConfig:
    optimizers = {"value": {"parameters": ["value_*"], "lr": value_lr}}
    agents = {"agents": {"x": "a", "y": "b"}, "modules": {"b": of_b}}
    return RunConfig.from_flat({"env": "CartPole-v1", "optimizers": optimizers, **agents})


def test_a_value_that_was_changed_in_a_table_of_the_configuration_counts() -> None:
    trained = {"a": "a", "b": "b"}
    before = two_modules({"lr": 1e-4})
    values = ChangedValues(before, trained)
    values.set("lr", 1e-3)
    values.set("lr_value", 5e-3)
    counters = json.loads(json.dumps(values.to_state()))
    checkpoint = Checkpoint((1, 1), {}, {}, counters, before.flat(), {})

    def kept(config: RunConfig) -> tuple[dict[str, float], ...]:
        values = ChangedValues(config, trained, checkpoint)
        return values.of("a", "a"), values.of("b", "b")

    both = {"lr": 1e-3, "lr_value": 5e-3}
    assert kept(before) == (both, both)
    assert kept(two_modules({"lr": 2e-4})) == (both, {"lr_value": 5e-3})
    assert kept(two_modules({"lr": 1e-4}, value_lr=2e-3)) == ({"lr": 1e-3}, {"lr": 1e-3})


def test_players_that_a_league_adds_later_can_be_named_and_those_it_lets_go_are_forgotten() -> None:
    trained = {"a": "a", "b": "b"}
    values = ChangedValues(two_modules({}), trained)
    trained["a-2"] = "a"
    values.set("lr", 1e-3, "a-2")
    assert values.of("a-2", "a") == {"lr": 1e-3}
    del trained["a-2"]
    assert values.to_state() == {}


# Trackers get a run's configuration, metrics and checkpoints, without delaying it.


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
