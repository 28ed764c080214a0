"""Messages from and to workers, with several agents and modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.json_format import MessageToDict
from support.workers_world import ROWS, SPACE, STEPS, WorkersWorld, ready_message

from juggler.driver.checkpoint.first_weights import frozen_modules
from juggler.driver.checkpoint.snapshots import counters_of, metrics_of
from juggler.driver.config import RunConfig
from juggler.driver.monitoring import plain_status
from juggler.driver.periodic_work import metrics_line
from juggler.driver.reporting.prometheus import families
from juggler.driver.run_end import Times
from juggler.driver.run_status import StatusReader
from juggler.driver.workers.command_sender import everything
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.actors.worker import from_json
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read, write
from juggler.runtime.connectors.mergeable_state import Moments, from_bytes, to_bytes
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

AGENTS = {"left": "blue", "right": "red"}
BOTH = ["blue", "red"]


def world_of_two(directory: Path, **keys: Any) -> WorkersWorld:
    """A run of two modules, after rounds of the first one."""
    world = WorkersWorld(directory, **{"agents": AGENTS, **keys})
    for index, (_, request) in enumerate(all_requests(world)):
        if not request.round:
            answer(world, index, live_steps=0)
    return world


def all_requests(world: WorkersWorld) -> list[tuple[int, training_pb2.SampleRequest]]:
    return world.asked(world.runner, training_pb2.SampleRequest)


def indices(world: WorkersWorld) -> list[int]:
    """Of the requests of rounds with both modules."""
    return [index for index, (_, each) in enumerate(all_requests(world)) if each.round]


def answer(world: WorkersWorld, index: int, **said: Any) -> None:
    """The runner answers one of the requests that it has got."""
    command_id, request = all_requests(world)[index]
    receipt = training_pb2.Receipt(
        module_id=request.module_id,
        batch_id=request.batch_id,
        learner=request.learner,
        **{"live_steps": ROWS * STEPS, **said},
    )
    world.reply(world.runner, command_id, receipt)


def updates_at(world: WorkersWorld, learner: int) -> list[tuple[int, training_pb2.Update]]:
    return world.asked(world.learners[learner], training_pb2.Update)


def finish(world: WorkersWorld, learner: int, number: int) -> None:
    """A learner has made its update of this number."""
    command_id, update = updates_at(world, learner)[number - 1]
    done = training_pb2.UpdateDone(
        module_id=update.module_id,
        update_id=update.update_id,
        version=training_pb2.WeightsVersion(generation=update.generation, update=number),
        steps_trained=ROWS * STEPS,
    )
    for batch_id in update.batch_ids:
        done.batches.add(batch_id=batch_id, live_steps=ROWS * STEPS)
    world.reply(world.learners[learner], command_id, done)


def test_the_runs_return_is_that_of_environments_and_modules_have_their_agents(
    tmp_path: Path,
) -> None:
    world = world_of_two(tmp_path)
    blue, red, *_ = indices(world)
    ended = {"env_returns": [7], "env_lengths": [9]}
    answer(world, blue, episode_returns=[3.0], episode_lengths=[5], **ended)
    answer(world, red, episode_returns=[4.0, 6.0], episode_lengths=[4, 4])
    line = metrics_line(world.parts)
    assert (line["episodes"], line["episode_return_mean"], line["episode_length_mean"]) == (1, 7, 9)
    means = {key: each["episode_return_mean"] for key, each in line["by_module"].items()}
    assert means == {"blue": 3.0, "red": 5.0}


def test_a_line_of_metrics_has_the_books_of_each_module(tmp_path: Path) -> None:
    world = world_of_two(tmp_path, num_learners=2, devices="cpu")
    first = indices(world)
    answer(world, first[0])
    answer(world, first[1], live_steps=5)
    finish(world, 0, number=1)
    line = metrics_line(world.parts)
    blue, red = (line["by_module"][name] for name in BOTH)
    for books in (line, blue, red):
        assert (
            books["env_steps_sampled"]
            == books["env_steps_trained"]
            + sum(books["env_steps_dropped"].values())
            + books["env_steps_in_flight"]
        )
    assert (blue["env_steps_trained"], blue["updates"], blue["staleness_max"]) == (20, 1, 0)
    assert (red["env_steps_in_flight"], red["updates"], red["staleness_max"]) == (5, 0, None)
    assert line["env_steps_sampled"] == 25
    assert (blue["learners"], red["learners"]) == (["learner-0"], ["learner-1"])
    assert line["learner_steps"]["learner-0"]["trained"] == 20


def test_a_module_that_has_lost_its_learner_holds_up_no_other(tmp_path: Path) -> None:
    world = world_of_two(tmp_path, num_learners=2, devices="cpu")
    world.leave(world.learners[1])
    assert not world.parts.end.reached
    for index in indices(world):
        answer(world, index)
    newest = all_requests(world)[-1][1]
    assert (newest.module_id, newest.round) == ("blue", 0)
    for number in (1, 2):
        finish(world, 0, number)
    assert world.parts.core.modules["blue"].weights_version.update == 2
    # It is back: rounds are of both again.
    world.get_ready(world.join("learner", 1))
    before = len(all_requests(world))
    for index in range(before - 2, before):
        answer(world, index)
    assert [request.module_id for _, request in all_requests(world)[before:]][:2] == BOTH


def test_what_connectors_learn_is_told_to_their_own_module_alone(tmp_path: Path) -> None:
    world = world_of_two(tmp_path)
    first = indices(world)
    learned = to_bytes({"filter": Moments.of(np.array([[1.0], [3.0]])).to_tree()})
    answer(world, first[0], connector_delta=learned)
    answer(world, first[1])
    told = {request.module_id: request.connector_state for _, request in all_requests(world)[-2:]}
    assert from_bytes(told["blue"])["filter"]["count"] == 2
    assert told["red"] == b""
    assert everything(world.parts.connectors) == to_bytes({"blue": from_bytes(learned)})


def test_the_status_tells_of_each_module(tmp_path: Path) -> None:
    world = world_of_two(tmp_path)
    first = indices(world)
    answer(world, first[0], episode_returns=[3.0], episode_lengths=[5])
    answer(world, first[1], live_steps=5)
    metrics = _samples(_status(world))
    assert metrics["juggler_module_steps_sampled_total", "blue"] == ROWS * STEPS
    assert metrics["juggler_module_steps_sampled_total", "red"] == 5
    assert metrics["juggler_module_steps_in_flight", "red"] == 5
    assert metrics["juggler_module_return_mean", "blue"] == 3.0
    assert ("juggler_module_return_mean", "red") not in metrics


def test_the_status_tells_of_modules_that_are_not_trained(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path, agents={"left": "blue", "right": "random"})
    world.parts.metrics.of("random").episodes_ended([-2.0], [5])
    world.parts.metrics.of("random").played += 7
    status = _status(world)
    assert [*status["metrics"]["by_module"]] == ["blue", "random"]
    metrics = _samples(status)
    assert metrics["juggler_module_steps_played_total", "random"] == 7
    assert metrics["juggler_module_return_mean", "random"] == -2.0
    of_random = {name for name, *labels in metrics if "random" in labels}
    assert of_random == {"juggler_module_steps_played_total", "juggler_module_return_mean"}
    assert ("juggler_module_steps_sampled_total", "blue") in metrics


def test_a_synchronous_run_ends_when_nobody_trains_one_of_its_modules(tmp_path: Path) -> None:
    world = world_of_two(tmp_path, num_learners=2, devices="cpu", synchronous=True)
    world.leave(world.learners[1])
    assert not world.parts.end.reached, "it may be started again"
    world.end_process(Exited("learner-1", 1, "exit code 1", None))
    assert "Without a learner: module 'red'" in world.parts.end.failure


def test_what_the_driver_learns_of_a_failed_round_ends_all_of_it(tmp_path: Path) -> None:
    world = world_of_two(tmp_path)
    before = len(all_requests(world))
    for index in indices(world)[:2]:
        world.fail(world.runner, all_requests(world)[index][0])
    assert "failed again" in world.why_dismissed(world.runner)
    assert len(all_requests(world)) == before + 2, "another round, before it is released"
    world.leave(world.runner)
    assert world.parts.core.requests_in_flight == 0
    assert world.parts.core.counters().sampled == 0


def _samples(status: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """Values of Prometheus, by name and labels."""
    return {
        (each.name, *each.labels.values()): each.value
        for family in families(status)
        for each in family.samples
    }


def _status(world: WorkersWorld) -> dict[str, Any]:
    journal = cast(Any, SimpleNamespace(newest=[]))
    newest_line = partial(metrics_line, world.parts)
    return plain_status(StatusReader("run", world.parts, journal, newest_line).read())


def checkpoint_of(world: WorkersWorld) -> Checkpoint:
    """What a run of two learners with two modules writes."""
    assert world.parts.checkpointing.begin()
    for learner in world.learners:
        ((command_id, asked),) = world.asked(learner, training_pb2.Snapshot)
        header = training_pb2.StateHeader(module_id=asked.module_id, extra="{}")
        for chunk in encode_frame(header, {"default": {"x": np.ones(3)}}, digest=True):
            world.reply(learner, command_id, any_pb2.Any(value=chunk))
    (written,) = world.written.gather(timeout=30)
    return read(written.path)


def test_the_arrays_that_a_run_goes_on_from_are_let_go_of_once_each_module_has_had_a_learner(
    tmp_path: Path,
) -> None:
    """Among them may be replays, which are large."""
    keys: dict[str, Any] = {"agents": AGENTS, "num_learners": 2, "devices": "cpu"}
    saved = checkpoint_of(WorkersWorld(tmp_path / "before", **keys))
    held = []

    class Resumed(WorkersWorld):
        def get_ready(self, worker: Worker, *module_ids: str) -> None:
            super().get_ready(worker, *module_ids)
            held.append((worker.worker_id, sorted(saved.tree)))

    world = Resumed(tmp_path / "after", resume=saved, **keys)
    assert held == [("envrunner-0", BOTH), ("learner-0", BOTH), ("learner-1", [])]
    for learner in world.learners:
        (*_, (_, part)) = world.asked(learner, training_pb2.Restore)
        assert part.last


def _say_hopeless(world: WorkersWorld, learner: int) -> None:
    command_id, update = updates_at(world, learner)[0]
    done = training_pb2.UpdateDone(
        module_id=update.module_id, update_id=update.update_id, hopeless="module 'x': not finite"
    )
    world.reply(world.learners[learner], command_id, done)


@pytest.mark.parametrize("learners", [1, 2])
def test_a_module_beyond_hope_ends_the_run_unless_another_learner_trains_on(
    tmp_path: Path, learners: int
) -> None:
    world = world_of_two(tmp_path, num_learners=learners, synchronous=True)
    for index in indices(world):
        answer(world, index)
    _say_hopeless(world, 0)
    end = world.parts.end
    if learners == 1:
        assert (end.reason, "not finite" in end.failure) == ("learner_lost", True)
        assert world.asked(world.learner, attach_pb2.Stop) == [], "it still has the last checkpoint"
    else:
        assert not end.reached
        ((_, stop),) = world.asked(world.learner, attach_pb2.Stop)
        assert "not finite" in stop.failure
    assert world.why_dismissed(world.learner) == "", "it would come back with its state"


# Messages between the driver and workers about modules that are not trained.


PLAYING = {"left": "main", "right": ["old", "random"]}


def world_of(directory: Path) -> WorkersWorld:
    """A run whose first EnvRunner has the weights of `old`."""
    said = {"observation": MessageToDict(SPACE), "action": MessageToDict(SPACE)}
    tree = {"default": {"parameters": {"scale": np.ones(3, np.float32)}, "buffers": {}}}
    saved = Checkpoint((1, 4), tree, {}, {}, RunConfig().flat(), said)
    write(directory / "before" / "checkpoints", saved, 1)
    table = {"train": False, "from": str(directory / "before")}
    keys: dict[str, Any] = {"agents": PLAYING, "modules": {"old": table}}
    return WorkersWorld(directory / "run", frozen=frozen_modules(RunConfig.from_flat(keys)), **keys)


@pytest.fixture
def playing(tmp_path: Path) -> WorkersWorld:
    return world_of(tmp_path)


def test_an_envrunner_gets_the_weights_before_its_setup(
    playing: WorkersWorld,
) -> None:
    assert list(playing.parts.core.modules) == ["main"]
    weights = FrozenWeights()
    for _, part in playing.asked(playing.runner, training_pb2.Restore):
        weights.add(part)
    ((_, setup),) = playing.asked(playing.runner, training_pb2.Setup)
    told = from_json(setup.config, EnvRunnerSetup)
    assert told.agents == PLAYING
    assert list(told.modules) == ["main", "old"]
    assert not told.modules["main"].digest
    assert weights._trees["old"][1] == told.modules["old"].digest


def test_an_envrunner_is_ready_with_what_is_trained_alone(
    playing: WorkersWorld,
) -> None:
    runner = playing.join("envrunner", 1)
    ((command_id, _),) = playing.asked(runner, training_pb2.Restore)
    playing.reply(runner, command_id, attach_pb2.Done())
    ((command_id, _),) = playing.asked(runner, training_pb2.Setup)
    shape = {"rows": ROWS, "steps": STEPS, "observation_space": SPACE, "action_space": SPACE}
    playing.reply(runner, command_id, ready_message("main", "old", **shape))
    assert "plays for main, old; the run's modules: main" in playing.why_dismissed(runner)


def played(module_id: str, steps: int, *returns: float) -> training_pb2.Receipt.Played:
    return training_pb2.Receipt.Played(
        module_id=module_id,
        steps=steps,
        episode_returns=returns,
        episode_lengths=[5] * len(returns),
    )


def test_steps_that_are_played_are_counted_beside_the_books(
    playing: WorkersWorld,
) -> None:
    playing.sample(
        module_id="main", played=[played("old", 12, 1.0, -1.0), played("random", 8, 0.5)]
    )
    playing.sample(1, module_id="main", played=[played("old", 3)])
    line = metrics_line(playing.parts)
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


def test_a_run_that_goes_on_counts_on(playing: WorkersWorld) -> None:
    playing.sample(module_id="main", played=[played("old", 12)])
    parts = playing.parts
    counters = counters_of(
        [parts.core.counters()], parts.core.past, 1, parts.metrics, Times(1.0, 1.0)
    )
    saved = Checkpoint((1, 1), {}, {}, counters, {}, {})
    assert metrics_of(saved).of("old").played == 12


# What is said of the weights of learners that get ready.


def test_a_learner_that_gets_ready_before_its_group_has_formed_has_lost_nothing(
    tmp_path: Path,
) -> None:
    before = WorkersWorld(tmp_path)
    assert before.parts.checkpointing.begin()
    ((command_id, asked),) = before.asked(before.learner, training_pb2.Snapshot)
    header = training_pb2.StateHeader(
        module_id=asked.module_id, version=Version(3, 7).message(), extra="{}"
    )
    for chunk in encode_frame(header, {"default": {"x": np.ones(3)}}, digest=True):
        before.reply(before.learner, command_id, any_pb2.Any(value=chunk))
    (written,) = before.written.gather(timeout=30)
    saved = read(written.path)

    class Resumed(WorkersWorld):
        """The second learner is set up when the first one is ready."""

        def get_ready(self, worker: Worker, *module_ids: str) -> None:
            if worker.role != "learner":
                return super().get_ready(worker, *module_ids)
            if worker.worker_id == "learner-1":
                self.snapshots.newest = saved.path
                assert not self.core.members
                (_, *restored) = self.parts.learners["default"].begin(worker, 0)
                assert restored, "from the checkpoint on the disk"
            (*_, (command_id, _)) = self.asked(worker, training_pb2.AddModule)
            point = f"127.0.0.1:{1000 + worker.index}"
            ready = training_pb2.ModuleReady(module_id="default", meeting_point=point)
            self.reply(worker, command_id, ready)

    world = Resumed(tmp_path, resume=saved, num_learners=2, devices="cpu")
    assert world.parts.core.modules["default"].weights_version.update == 7
    assert world.core.members == ("learner-0", "learner-1")
    assert not [text for text in world.told.messages if "lost" in text]
