"""Numbers that a callback puts in the place of schedules, as updates tell learners of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.synchronous_rounds import answer_the_snapshot, play_a_round, synchronous
from support.worker_events_world import WorkersWorld

from juggler.driver.changed_values import ChangedValues
from juggler.driver.checkpoint.books import must_be_sound
from juggler.driver.config import RunConfig
from juggler.runtime.checkpoints.checkpoint import CheckpointError, read
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
    run.set("lr", 1e-3)
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
    assert ChangedValues(config, checkpoint).of("default", "default") == both
    other = RunConfig.from_flat({**checkpoint.config, "lr": 7e-4})
    assert ChangedValues(other, checkpoint).of("default", "default") == {"entropy_coefficient": 0.5}
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
    values = ChangedValues(RunConfig.from_flat({"env": "CartPole-v1", "optimizers": optimizers}))
    with pytest.raises(ValueError, match=words):
        values.set(*arguments)
    assert values.of("default", "default") == {}
    assert values.to_state() == {}
    values.set("lr_value", 2e-3)
    assert values.of("default", "default") == {"lr_value": 2e-3}
