"""Numbers that a callback puts in the place of schedules, as updates tell learners of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synchronous_rounds import answer_the_snapshot, play_a_round, synchronous
from support.worker_events_world import WorkersWorld

from juggler.driver.changed_values import ChangedValues
from juggler.driver.checkpoint.books import must_be_sound
from juggler.driver.config import RunConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.wire.v1 import training_pb2


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
    world._loop._hear(written)
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
    with pytest.raises(CheckpointError, match="cannot be those of a run"):
        must_be_sound(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("gamma", 0.9),
            r"set\('gamma', 0.9\): this cannot change while a run trains; what can is",
        ),
        (("lrr", 1e-3), r"^set\('lrr', 0.001\): did you mean 'lr'\?$"),
        (("lr", -1.0), r"set\('lr', -1.0\): lr = -1.0: must be above 0"),
        (("lr", True), "expected a number, or None"),
        (("lr", "1e-3"), "expected a number, or None"),
        (("entropy_coefficient", float("nan")), "expected a finite number"),
        (("lr", 1e-3, "defualt"), "no module 'defualt': did you mean 'default'"),
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


def test_of_two_calls_about_one_module_the_later_one_counts() -> None:
    values = ChangedValues(two_modules({}), {"a": "a", "b": "b"})
    values.set("lr", 1e-3, "a")
    values.set("lr", 2e-3)
    assert values.of("a", "a") == values.of("b", "b") == {"lr": 2e-3}
    values.set("lr", None, "a")
    assert (values.of("a", "a"), values.of("b", "b")) == ({}, {"lr": 2e-3})
    values.set("lr", 3e-3)
    assert values.of("a", "a") == values.of("b", "b") == {"lr": 3e-3}
    values.set("lr", None)
    assert values.of("a", "a") == values.of("b", "b") == {}
    assert values.in_words() == ""


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
