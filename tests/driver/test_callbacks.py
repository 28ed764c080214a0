"""Callbacks get a run's events, and may change its numbers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.workers_world import WorkersWorld, answer_the_snapshot, play_a_round, synchronous

import juggler
from juggler.driver import callbacks
from juggler.driver.callbacks import ChangedValues, checked
from juggler.driver.checkpoint.snapshots import must_be_sound
from juggler.driver.config import RunConfig
from juggler.driver.periodic_work import metrics_line
from juggler.driver.signals import SecondSignal
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
