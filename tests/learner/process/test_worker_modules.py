"""Several modules in one LearnerWorker: what is each one's own, and whom a failure concerns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.worker_world import BEGIN, GENERATION, PERMITS, World

from juggler.driver.checkpoint.restoring import restores
from juggler.learner.process import state_handover
from juggler.learner.process.program import LearnerSetup, ModuleSetup
from juggler.runtime.actors.setups import from_json
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

MakeBatch = Callable[..., EpisodeBatch]
RIVAL = 9  # the rival's generation, with weights of update 0


@pytest.fixture
def world(tmp_path: Path, make_batch: MakeBatch) -> Iterator[World]:
    """Modules "default" and "rival"; failures end nothing."""
    made = World(tmp_path, make_batch, outlives_failures=True)
    made.add("rival", max_staleness=50)
    made.join(RIVAL, "rival")
    yield made
    made.close()


def failed(world: World, command: Any) -> str:
    world.driver.tell(command)
    return str(world.driver.heard())


def test_each_module_has_its_versions_weights_and_books(world: World) -> None:
    ours = world.weights_of(Version(GENERATION, BEGIN.update))
    theirs = world.weights_of(Version(RIVAL, 0), "rival")
    np.testing.assert_array_equal(ours, theirs)  # equal specs begin equal, whatever their id
    assert world.send(1, BEGIN.update) == world.send(2, BEGIN.update) == ("", "")
    assert world.send(3, 0, RIVAL, "rival") == ("", "")
    done = world.update(3, module_id="rival")
    assert (done.module_id, Version.of(done.version)) == ("rival", (RIVAL, 1))
    assert done.steps_trained == world.steps(3)
    assert (world.weights_of(Version(RIVAL, 1), "rival") != theirs).any()
    done = world.update(1, 2)
    assert (done.module_id, Version.of(done.version)) == ("default", (GENERATION, 11))
    assert done.steps_trained == world.steps(1, 2)
    world.join(RIVAL + 1, "rival")
    world.weights_of(Version(RIVAL + 1, 1), "rival")
    assert world.module.version == (GENERATION, 11)


def test_a_learner_says_of_each_module_whether_it_can_be_trained_with_others(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    world = World(tmp_path, make_batch, may_meet=True)
    world.add("many", algorithm="support.own_algorithms:Many")
    assert world.ready["default"].why_alone == ""
    told = world.ready["many"].why_alone
    assert told.endswith("cannot train in a group of learners")
    world.add("queue", algorithm="dqn", max_times_sampled=1, replay_ratio=1.0)
    told = world.ready["queue"].why_alone
    assert told.startswith("max_times_sampled = 1 with several learners: they would run out of st")
    assert world.ready["many"].meeting_point, "it does not say so for want of one"
    world.close()


def test_a_learner_says_of_each_module_how_much_memory_its_steps_will_take(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    world = World(tmp_path, make_batch)
    module = world.add("replayed", algorithm="dqn", replay_capacity=10_000)
    assert world.ready["default"].kept_bytes == 0
    assert world.ready["replayed"].kept_bytes == int(module.learner.kept_bytes) > 10_000
    world.close()


def test_a_batch_is_of_the_module_that_it_was_asked_for(world: World) -> None:
    reason, explanation = world.send(1, 0, RIVAL, "stranger")
    assert (reason, explanation) == ("refused", "no module 'stranger' is here")
    reason, explanation = world.send(1, 0, RIVAL, "rival", permit=PERMITS.of(1, "default"))
    assert reason == "learner_lost"
    assert "batch 1 has no permit of the driver's" in explanation
    assert world.send(1, 0, RIVAL, "rival") == ("", "")
    done = world.update(1)
    assert [used.dropped for used in done.batches] == ["restart"], "it is not the default one's"
    assert world.update(1, module_id="rival").steps_trained == world.steps(1)


def test_what_one_module_cannot_do_concerns_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = world.worker.modules["rival"].learner
    monkeypatch.setattr(rival, "step", lambda sample: 1 / 0)
    world.send(1, 0, RIVAL, "rival")
    world.ask_for_update(1, module_id="rival")
    assert "division by zero" in str(world.driver.heard())
    assert "no module 'rivl' is here: did you mean 'rival'" in failed(
        world, training_pb2.Update(module_id="rivl", batch_ids=[1])
    )
    assert "module 'rival' is here already" in failed(
        world, training_pb2.AddModule(module_id="rival")
    )
    world.send(2, BEGIN.update)
    assert Version.of(world.update(2).version) == (GENERATION, 11)


def test_an_exact_update_is_made_of_all_its_batches_or_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch_id in (1, 2, 3):
        world.send(batch_id, update=0)  # long too old for an update of a run
    done = world.update(1, exact=True, num_epochs=2)
    assert [(used.staleness, used.dropped) for used in done.batches] == [(0, "")]
    assert done.metrics["default"].values["skipped"] == 0.0
    assert Version.of(done.version).update == BEGIN.update + 1
    assert "batches [9] are not here" in failed(
        world, training_pb2.Update(module_id="default", batch_ids=[2, 9], exact=True)
    )
    monkeypatch.setattr(
        world.module.learner,
        "after_gradients",
        lambda grads, aux: (grads * math.nan, aux),
    )
    assert "not finite, so this update changed nothing" in failed(
        world, training_pb2.Update(module_id="default", batch_ids=[3], exact=True)
    )


def test_a_module_that_is_removed_leaves_the_others_and_may_come_back(world: World) -> None:
    world.driver.ask(training_pb2.RemoveModule(module_id="rival"), attach_pb2.Done())
    assert world.send(1, 0, RIVAL, "rival") == ("refused", "no module 'rival' is here")
    assert world.send(2, BEGIN.update) == ("", "")
    world.add("rival")
    world.join(RIVAL + 1, "rival")
    world.weights_of(Version(RIVAL + 1, 0), "rival")


def test_weights_and_states_go_from_one_module_to_another(world: World) -> None:
    world.send(1, BEGIN.update)
    world.update(1)
    before = world.weights_of(Version(GENERATION, 11))
    chunk = world.driver.ask(training_pb2.Snapshot(module_id="default"), any_pb2.Any())
    part = training_pb2.Restore(
        module_id="rival", chunk=chunk.value, last=True, state_bytes=1 << 20
    )
    world.driver.ask(part, attach_pb2.Done())
    world.join(RIVAL + 1, "rival")
    np.testing.assert_array_equal(world.weights_of(Version(RIVAL + 1, 11), "rival"), before)


def test_a_setup_that_lacks_something_or_has_more_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"an invalid LearnerSetup: .*`may_meet`"):
        from_json('{"device": "cpu", "updates_in_flight": 2}', LearnerSetup)
    with pytest.raises(ValueError, match="an invalid ModuleSetup: Expected `object`"):
        from_json('{"learner": {}, "module": 3, "connectors": {}}', ModuleSetup)


def test_a_module_that_was_handed_its_state_takes_the_weights_of_a_later_reset(
    world: World,
) -> None:
    """The driver sends no state where it has none, so none is left out for the newer one."""
    module = world.module
    chunks = module.handover.chunks("default", module.learner, "run", module.version)
    state_handover.hand_over([chunks])
    module.handover = state_handover.StateHandover(state_handover.receive()["default"])
    command = training_pb2.AddModule(oldest_handover=Version(0, 0).message())
    ready = training_pb2.ModuleReady()
    module.take_over("run", command, ready)
    assert ready.HasField("handed_over")
    world.join(GENERATION + 1)
    others = world.worker.modules["rival"].learner
    others.reset(seed=123)
    given = others.get_weights()
    for command in (
        training_pb2.Reset(module_id="default", seed=1),
        *restores("default", {"default": given}, {}, training_pb2.Restore(weights=True)),
    ):
        world.driver.ask(command, attach_pb2.Done())
    taken = module.learner.get_weights()
    for name, weights in given.items():
        np.testing.assert_array_equal(taken[name], weights)


@pytest.mark.parametrize("selectable", [False, True])
def test_weights_of_another_network_are_refused_and_keys_are_named_where_they_help(
    world: World, selectable: bool
) -> None:
    source = "from_checkpoint = 'runs/other'"
    weights = {"default": {"encoder.0.weight": np.ones((3, 3), np.float32)}}
    last = training_pb2.Restore(weights=True, whole=True, source=source, selectable=selectable)
    (part,) = restores("rival", weights, {}, last)
    said = failed(world, part)
    assert said.startswith(f"{source}: weights ")
    assert "of another network" in said
    assert ("name them in from_parameters" in said) == selectable


@pytest.mark.parametrize(
    ("steps", "config"),
    [
        (9, {"algorithm": "dqn", "replay_begin": 0, "replay_batch_size": 2, "replay_ratio": 2.0}),
        (6, {"algorithm": "ppo", "epochs": 3, "minibatches": 2}),
    ],
)
def test_a_learner_makes_progress_with_each_part_of_an_update(
    tmp_path: Path, make_batch: MakeBatch, steps: int, config: dict[str, Any]
) -> None:
    """An update of many parts may take longer than `hang_seconds`."""
    world = World(tmp_path, make_batch, **config)
    assert world.send(1, BEGIN.update) == ("", "")
    before = world.driver.progressed
    done = world.update(1)
    assert not done.peer_lost
    assert world.driver.progressed - before >= steps
    world.close()
