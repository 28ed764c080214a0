"""An EnvRunner with two modules evaluates both, with the newest weights or a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.made_files import checkpoint
from support.runner_world import PATIENCE, RunnerWorld
from support.scripted_agents import ScriptedAgents

from juggler.runtime.checkpoints.checkpoint import write
from juggler.runtime.wire.v1 import training_pb2


def test_an_evaluation_plays_whole_episodes_with_the_newest_weights_of_all(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents
) -> None:
    world = make_world()
    world.begin()
    world.learners["reds"].publish(1)
    world.play(reds=1, blues=0)
    told = world.driver.ask(training_pb2.Evaluate(episodes=7, seed=3), training_pb2.Evaluation)
    assert len(told.episode_returns) == 7
    assert told.version.update == 0, "the oldest among those that play"
    actions = {slot: {a for e in log for a in e.actions} for slot, log in envs.log.items()}
    assert [actions[slot] for slot in (0, 1, 2)] == [{1}, {1}, {0}]


def test_an_evaluation_of_a_checkpoint_loads_the_weights_of_every_module(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents, tmp_path: Path
) -> None:
    world = make_world()
    world.begin()
    states = {
        module_id: {"parameters": {"scale": np.array(scale, np.float32)}, "buffers": {}}
        for module_id, scale in (("reds", 2.0), ("blues", 1.0))
    }
    of_module = {"version": [1, 9], "extra": {}}
    saved = checkpoint(9, tree=states, modules=dict.fromkeys(states, of_module))
    command = training_pb2.Evaluate(episodes=4, checkpoint=str(write(tmp_path, saved, keep=1)))
    told = world.driver.ask(command, training_pb2.Evaluation)
    assert (told.version.update, len(told.episode_returns)) == (9, 4)
    actions = {slot: {a for e in log for a in e.actions} for slot, log in envs.log.items()}
    assert [actions[slot] for slot in (0, 1, 2)] == [{2}, {2}, {1}]
    # What the learners publish is loaded again, although it has not changed.
    world.driver.ask(training_pb2.Evaluate(episodes=4), training_pb2.Evaluation)
    assert {a for log in envs.log.values() for e in log for a in e.actions} == {0}


def test_a_checkpoint_that_lacks_a_module_is_refused(
    make_world: Callable[..., RunnerWorld], tmp_path: Path
) -> None:
    world = make_world()
    world.begin()
    states = {"reds": {"parameters": {"scale": np.zeros((), np.float32)}, "buffers": {}}}
    saved = checkpoint(9, tree=states, modules={"reds": {"version": [1, 9], "extra": {}}})
    path = write(tmp_path, saved, keep=1)
    world.driver.tell(training_pb2.Evaluate(episodes=4, checkpoint=str(path)))
    failure = world.driver._answers.get(timeout=PATIENCE)
    assert "has no weights of module 'blues'" in str(failure)
