"""Messages, goals and metrics of several agents and modules."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.json_format import MessageToDict
from support.workers_world import (
    ROWS,
    SPACE,
    STEPS,
    WorkersWorld,
    answer_the_snapshot,
    begin_an_evaluation,
    ready_message,
)

from juggler.driver.agent_tables import FoundGroup, with_agents
from juggler.driver.checkpoint.first_weights import frozen_modules
from juggler.driver.checkpoint.snapshots import metrics_of, must_be_sound
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.monitoring import plain_status
from juggler.driver.periodic_work import metrics_line
from juggler.driver.reporting.episode_returns import ReturnGoals
from juggler.driver.reporting.live_progress import LiveProgress
from juggler.driver.reporting.prometheus import families
from juggler.driver.run_status import StatusReader
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


def test_what_connectors_learn_is_told_to_their_own_module_alone(tmp_path: Path) -> None:
    world = world_of_two(tmp_path)
    first = indices(world)
    learned = to_bytes({"filter": Moments.of(np.array([[1.0], [3.0]])).to_tree()})
    answer(world, first[0], connector_delta=learned)
    answer(world, first[1])
    told = {request.module_id: request.connector_state for _, request in all_requests(world)[-2:]}
    assert from_bytes(told["blue"])["filter"]["count"] == 2
    assert told["red"] == b""
    merged = {module_id: each.connectors.merged for module_id, each in world.parts.modules.items()}
    assert to_bytes(merged) == to_bytes({"red": {}, "blue": from_bytes(learned)})


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
    assert world.parts.checkpoints.begin()
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


@pytest.mark.parametrize("learners", [1, 2])
def test_a_module_beyond_hope_ends_the_run_unless_another_learner_trains_on(
    tmp_path: Path, learners: int
) -> None:
    world = world_of_two(tmp_path, num_learners=learners, synchronous=True)
    for index in indices(world):
        answer(world, index)
    command_id, update = updates_at(world, 0)[0]
    done = training_pb2.UpdateDone(
        module_id=update.module_id, update_id=update.update_id, hopeless="module 'x': not finite"
    )
    world.reply(world.learners[0], command_id, done)
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


@pytest.fixture
def playing(tmp_path: Path) -> WorkersWorld:
    """A run whose first EnvRunner has the weights of `old`."""
    said = {"observation": MessageToDict(SPACE), "action": MessageToDict(SPACE)}
    tree = {"default": {"parameters": {"scale": np.ones(3, np.float32)}, "buffers": {}}}
    saved = Checkpoint((1, 4), tree, {}, {}, RunConfig().flat(), said)
    write(tmp_path / "before" / "checkpoints", saved, 1)
    table = {"train": False, "from": str(tmp_path / "before")}
    keys: dict[str, Any] = {"agents": PLAYING, "modules": {"old": table}}
    return WorkersWorld(tmp_path / "run", frozen=frozen_modules(RunConfig.from_flat(keys)), **keys)


def test_an_envrunner_gets_the_weights_before_its_setup(playing: WorkersWorld) -> None:
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


def test_an_envrunner_is_ready_with_what_is_trained_alone(playing: WorkersWorld) -> None:
    runner = playing.join("envrunner", 1)
    ((command_id, _),) = playing.asked(runner, training_pb2.Restore)
    playing.reply(runner, command_id, attach_pb2.Done())
    ((command_id, _),) = playing.asked(runner, training_pb2.Setup)
    shape = {"rows": ROWS, "steps": STEPS, "observation_space": SPACE, "action_space": SPACE}
    playing.reply(runner, command_id, ready_message("main", "old", **shape))
    assert "plays for main, old; the run's modules: main" in playing.why_dismissed(runner)


# What is said of the weights of learners that get ready.


def test_a_learner_that_gets_ready_before_its_group_has_formed_has_lost_nothing(
    tmp_path: Path,
) -> None:
    before = WorkersWorld(tmp_path)
    assert before.parts.checkpoints.begin()
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
                self.parts.checkpoints.newest = saved.path
                assert not self.core.members
                (_, *restored) = self.parts.modules["default"].begin(worker, 0)
                assert restored, "from the checkpoint on the disk"
            (*_, (command_id, _)) = self.asked(worker, training_pb2.AddModule)
            point = f"127.0.0.1:{1000 + worker.index}"
            ready = training_pb2.ModuleReady(module_id="default", meeting_point=point)
            self.reply(worker, command_id, ready)

    world = Resumed(tmp_path, resume=saved, num_learners=2, devices="cpu")
    assert world.parts.core.modules["default"].weights_version.update == 7
    assert world.core.members == ("learner-0", "learner-1")
    assert not [text for text in world.told.messages if "lost" in text]


# Goals and metrics of single modules and agents.


PLAYED_BY = {"a": "main", "b": "main"}
OLD = {"old": {"train": False, "from": "runs/old"}}


def world_of_one(directory: Path, **keys: Any) -> WorkersWorld:
    keys = {"agents": PLAYED_BY, "only_local": True, "batch_size": 1000, **keys}
    return WorkersWorld(directory / "checkpoints", **keys)


def agent_returns(**returns: list[float]) -> list[training_pb2.AgentReturns]:
    return [
        training_pb2.AgentReturns(agent=agent, module_id="main", returns=got)
        for agent, got in returns.items()
    ]


def train(world: WorkersWorld, a: float, b: float, episodes: int = 100, **said: Any) -> None:
    """Answer the newest request: N episodes, with these returns of agents."""
    command_id, request = world.asked(world.runner, training_pb2.SampleRequest)[-1]
    receipt = training_pb2.Receipt(
        module_id=request.module_id,
        batch_id=request.batch_id,
        learner="learner-0",
        live_steps=ROWS * STEPS,
        episode_returns=[a, b] * episodes,
        episode_lengths=[5] * 2 * episodes,
        env_returns=[a + b] * episodes,
        env_lengths=[10] * episodes,
        **{"agent_returns": agent_returns(a=[a] * episodes, b=[b] * episodes), **said},
    )
    world.reply(world.runner, command_id, receipt)


def cut(world: WorkersWorld) -> None:
    answer_the_snapshot(world, "main")
    written = world.on_disk()
    world.parts.evaluations.written(written)
    world.turn()


def play(world: WorkersWorld, player: Any, a: float, b: float) -> None:
    command_id, command = world.asked(player, training_pb2.Evaluate)[-1]
    assert not command.HasField("goal"), "it plays every episode"
    done = training_pb2.Evaluation(
        episode_returns=[a + b] * command.episodes,
        episode_lengths=[10] * command.episodes,
        agent_returns=agent_returns(a=[a] * command.episodes, b=[b] * command.episodes),
    )
    world.reply(player, command_id, done)


@pytest.mark.parametrize("stop_return", [{"main": 20.0}, {"a": 19.0, "b": 21.0}])
def test_a_run_is_solved_when_modules_and_agents_with_a_goal_reach_it(
    tmp_path: Path, stop_return: dict[str, float]
) -> None:
    world = world_of_one(tmp_path, stop_return=stop_return)
    player = world.joined("evaluator")
    train(world, 30.0, 5.0)
    assert not world.asked(world.learner, training_pb2.Snapshot)
    train(world, 19.0, 21.0)
    told = {"main": "main 20.00"}.get(next(iter(stop_return)), "a 19.00, b 21.00")
    assert world.told.messages[-1].startswith(f"training has a return of {told}: ")
    cut(world)
    play(world, player, 18.0, 21.0)
    assert world.parts.end.reason == ""
    refused = world.told.messages[-1]
    assert refused.startswith("not confirmed: update 0 has a return of ")
    assert refused.endswith(f" in 100 episodes, instead of {told} in 100; training continues")
    train(world, 19.0, 21.0)
    cut(world)
    play(world, player, 19.0, 21.0)
    assert world.parts.end.reason == "solved"
    outcome = world.parts.evaluations.outcome
    assert outcome is not None
    means = {"main": 20.0} if "main" in stop_return else {"a": 19.0, "b": 21.0}
    assert outcome["return_mean"] == outcome["training_return_mean"] == means
    assert outcome["return_deviation"] == {
        name: 1.0 if name == "main" else 0.0 for name in stop_return
    }


def test_metrics_have_the_returns_of_each_agent(tmp_path: Path) -> None:
    world = world_of_one(tmp_path, stop_return={"main": 20.0})
    before = metrics_line(world.parts)
    assert before["stop_returns"] == {"main": None}
    assert before["by_agent"]["a"] == {
        "episodes": 0,
        "episode_return_mean": None,
        "evaluation_return_mean": None,
    }
    train(world, 3.0, -3.0, episodes=2)
    line = metrics_line(world.parts)
    assert (line["episode_return_mean"], line["stop_returns"]) == (0.0, {"main": 0.0})
    means = {agent: each["episode_return_mean"] for agent, each in line["by_agent"].items()}
    assert means == {"a": 3.0, "b": -3.0}
    journal = type("Journal", (), {"newest": []})()
    reader = StatusReader("run", world.parts, journal, lambda: line)
    values = {
        (sample.name, sample.labels.get("agent")): sample.value
        for family in families(plain_status(reader.read()))
        for sample in family.samples
    }
    assert values["juggler_agent_return_mean", "b"] == -3.0
    assert values["juggler_agent_episodes_total", "a"] == 2


@pytest.mark.parametrize("goal", [{"main": 20.0}, {"a": 19.0, "b": 21.0}])
def test_a_run_that_goes_on_has_what_modules_and_agents_had_got(
    tmp_path: Path, goal: dict[str, float]
) -> None:
    world = world_of_one(tmp_path)
    train(world, 30.0, 5.0, episodes=50)
    train(world, 19.0, 21.0)
    world.ask_for_a_snapshot()
    answer_the_snapshot(world, "main")
    (written,) = world.written.gather(timeout=30)
    saved = read(written.path)
    must_be_sound(saved)
    before, resumed = world.parts.metrics, metrics_of(saved)
    assert resumed.by_agent == before.by_agent
    assert resumed.of("main").line() == before.of("main").line()
    assert resumed.of("main").episodes == 300
    assert ReturnGoals(goal).proposed(resumed) == goal, "with no new episode"


@pytest.mark.parametrize("module_id", ["main", "old", "random"])
def test_an_evaluation_tells_of_each_module_that_played(tmp_path: Path, module_id: str) -> None:
    agents = {"a": "main", "b": ["old", "random"]}
    world = world_of_one(tmp_path, agents=agents, modules=OLD, evaluation_seconds=1000.0)
    player = world.joined("evaluator")
    begin_an_evaluation(world, "main")
    command_id, command = world.asked(player, training_pb2.Evaluate)[-1]
    told = training_pb2.AgentReturns(agent="b", module_id=module_id, returns=[1.0])
    returns, lengths = [1.0] * command.episodes, [5] * command.episodes
    done = {"episode_returns": returns, "episode_lengths": lengths, "agent_returns": [told]}
    world.reply(player, command_id, training_pb2.Evaluation(**done))
    assert module_id in world.parts.metrics.by_module
    assert world.parts.metrics.evaluation_return == 1.0


def found(*agents: str, **keys: Any) -> RunConfig:
    return with_agents(RunConfig.from_flat(keys), [FoundGroup(agents, None, None)])


@pytest.mark.parametrize(
    ("agents", "goals", "words"),
    [
        (("a", "b"), {"mian": 1.0}, "neither a module nor an agent of"),
        (("a", "b"), {"zebra": 1.0}, "of this run: known are a, b, main"),
        ((), {"main": 20.0}, "CartPole-v1 has one agent: give a"),
        (tuple(f"a{k}" for k in range(33)), {"a3": 1.0}, "'a3' is one of 33 agents, and with more"),
    ],
)
def test_a_goal_of_nobody_is_refused_with_the_nearest_name(
    agents: tuple[str, ...], goals: dict[str, float], words: str
) -> None:
    keys: dict[str, Any] = {"agents": {"*": "main"}} if agents else {}
    with pytest.raises(ConfigError) as refused:
        found(*agents, stop_return=goals, **keys)
    assert words in str(refused.value)


CONFIG = {"env": "pettingzoo:classic/connect_four_v3", "algorithm": "ppo"}
LINE = {
    **{"wall_time": 3.0, "env_steps_trained": 100, "steps_per_second": 10.0, "updates": 1},
    **{"episode_return_mean": 0.0, "staleness_mean": 0.0, "num_env_runners": 2},
    "by_agent": {"white": {"episode_return_mean": 0.3}, "black": {"episode_return_mean": -0.3}},
}


def test_the_live_display_has_a_bar_for_each_goal() -> None:
    from rich.console import Console

    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system=None)
    progress = LiveProgress(console)
    progress._config = {**CONFIG, "stop_return": {"main": 0.9}}
    for mean in (0.0, 0.45):
        progress.update({**LINE, "stop_returns": {"main": mean}})
    with console.capture() as captured:
        console.print(progress)
    row = next(row for row in captured.get().splitlines() if "│ main" in row)
    assert "0.45" in row
    assert "0.90" in row
    assert "━" in row
