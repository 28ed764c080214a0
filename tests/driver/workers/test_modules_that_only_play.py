"""What the driver tells workers of modules that are not trained, and hears of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from support.ready import ready_message
from support.worker_events_world import ROWS, SPACE, STEPS, WorkersWorld

from juggler.driver.checkpoint.books import counters_of
from juggler.driver.checkpoint.frozen_modules import frozen_modules
from juggler.driver.checkpoint.restoring import metrics_of
from juggler.driver.config import RunConfig
from juggler.driver.record.checkpoints import write
from juggler.driver.run_clock import Times
from juggler.driver.upkeep import metrics_line
from juggler.driver.workers import frozen_parts
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.runtime.actors.setups import from_json
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

AGENTS = {"left": "main", "right": ["old", "random"]}


def world_of(directory: Path) -> WorkersWorld:
    """A run whose first EnvRunner has got what `old` plays with, and its setup."""
    said = {"observation": MessageToDict(SPACE), "action": MessageToDict(SPACE)}
    tree = {"default": {"parameters": {"scale": np.ones(3, np.float32)}, "buffers": {}}}
    saved = Checkpoint((1, 4), tree, {}, {}, RunConfig().flat(), said)
    write(directory / "before" / "checkpoints", saved, 1)
    table = {"train": False, "from": str(directory / "before")}
    keys: dict[str, Any] = {"agents": AGENTS, "modules": {"old": table}}
    return WorkersWorld(directory / "run", frozen=frozen_modules(RunConfig.from_flat(keys)), **keys)


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return world_of(tmp_path)


def test_an_envrunner_gets_the_weights_before_its_setup(world: WorkersWorld) -> None:
    assert list(world.parts.core.modules) == ["main"]
    weights = FrozenWeights()
    for _, part in world.asked(world.runner, training_pb2.Restore):
        weights.take(part)
    ((_, setup),) = world.asked(world.runner, training_pb2.Setup)
    told = from_json(setup.config, EnvRunnerSetup)
    assert told.agents == AGENTS
    assert list(told.modules) == ["main", "old"]
    assert not told.modules["main"].digest
    assert weights._trees["old"][1] == told.modules["old"].digest


def test_each_part_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [training_pb2.Restore(module_id="old", chunk=bytes([k])) for k in range(3)]
    monkeypatch.setattr(frozen_parts, "restores", lambda *_: parts)
    world = world_of(tmp_path)
    late = world.join("envrunner", 1)
    for count in (1, 2, 3):
        sent = world.asked(late, training_pb2.Restore)
        assert [part.chunk[0] for _, part in sent] == list(range(count))
        assert not world.asked(late, training_pb2.Setup)
        world.reply(late, sent[-1][0], attach_pb2.Done())
    assert len(world.asked(late, training_pb2.Setup)) == 1
    gone = world.join("envrunner", 2)
    world.leave(gone)
    again = world.join("envrunner", 2)
    assert len(world.asked(again, training_pb2.Restore)) == 1, "a new process gets all of them"


def test_learners_hear_nothing_of_it(world: WorkersWorld) -> None:
    hosted = [each.module_id for _, each in world.asked(world.learner, training_pb2.AddModule)]
    assert hosted == ["main"]
    assert not world.asked(world.learner, training_pb2.Restore)


def test_an_envrunner_is_ready_with_what_is_trained_alone(world: WorkersWorld) -> None:
    runner = world.join("envrunner", 1)
    ((command_id, _),) = world.asked(runner, training_pb2.Restore)
    world.reply(runner, command_id, attach_pb2.Done())
    ((command_id, _),) = world.asked(runner, training_pb2.Setup)
    shape = {"rows": ROWS, "steps": STEPS, "observation_space": SPACE, "action_space": SPACE}
    world.reply(runner, command_id, ready_message("main", "old", **shape))
    assert "it acts with the modules main, old: it must with main" in world.why_dismissed(runner)


def played(module_id: str, steps: int, *returns: float) -> training_pb2.Receipt.Played:
    return training_pb2.Receipt.Played(
        module_id=module_id,
        steps=steps,
        episode_returns=returns,
        episode_lengths=[5] * len(returns),
    )


def test_steps_that_are_played_are_counted_beside_the_books(world: WorkersWorld) -> None:
    world.sample(module_id="main", played=[played("old", 12, 1.0, -1.0), played("random", 8, 0.5)])
    world.sample(1, module_id="main", played=[played("old", 3)])
    line = metrics_line(world.parts)
    assert line["env_steps_sampled"] == line["env_steps_in_flight"] == 2 * ROWS * STEPS
    assert list(line["by_module"]) == ["main", "old", "random"]
    assert line["by_module"]["main"]["env_steps_sampled"] == 2 * ROWS * STEPS
    assert line["by_module"]["old"] == {
        "env_steps_played": 15,
        "episodes": 2,
        "episode_return_mean": 0.0,
        "episode_length_mean": 5.0,
        "evaluation_return_mean": None,
    }
    assert line["by_module"]["random"]["env_steps_played"] == 8


def test_they_are_counted_even_where_the_batch_is_lost(world: WorkersWorld) -> None:
    lost = {"dropped": "learner_lost", "explanation": "no learner"}
    world.sample(module_id="main", played=[played("old", 12, 1.0)], **lost)
    assert metrics_line(world.parts)["by_module"]["old"]["env_steps_played"] == 12


def test_a_run_that_goes_on_counts_on(world: WorkersWorld) -> None:
    world.sample(module_id="main", played=[played("old", 12)])
    parts = world.parts
    counters = counters_of(
        [parts.core.counters()], parts.core.past, 1, parts.metrics, Times(1.0, 1.0)
    )
    saved = Checkpoint((1, 1), {}, {}, counters, {}, {})
    assert metrics_of(saved).of("old").played == 12


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([played("main", 1)], "module 'main' played, and is none to play"),
        ([played("x" * 200, 1)], "played, and is none to play"),
        ([played("old", 1 << 40)], "steps of a module that is not trained"),
        ([played("old", 1, float("nan"))], "a return that is not finite"),
        ([played("old", 1, *[0.0] * 70_000)], "episodes, where there can be"),
        ([played("old", 1)] * 1001, "1001 modules that played: at most 1000"),
    ],
)
def test_what_cannot_have_been_played_is_not_believed(
    world: WorkersWorld, said: list[Any], words: str
) -> None:
    world.sample(module_id="main", played=said)
    assert words in world.why_dismissed(world.runner)
