"""Goals and metrics of single modules and agents."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from support.workers_world import (
    ROWS,
    STEPS,
    WorkersWorld,
    answer_the_snapshot,
    begin_an_evaluation,
)

from juggler.driver.agent_tables import FoundGroup, with_agents
from juggler.driver.checkpoint.snapshots import metrics_of, must_be_sound
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.monitoring import plain_status
from juggler.driver.periodic_work import metrics_line
from juggler.driver.reporting.episode_returns import ReturnGoals
from juggler.driver.reporting.live_progress import LiveProgress
from juggler.driver.reporting.prometheus import families
from juggler.driver.run_status import StatusReader
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.wire.v1 import training_pb2

AGENTS = {"a": "main", "b": "main"}
OLD = {"old": {"train": False, "from": "runs/old"}}


def world_of_one(directory: Path, **keys: Any) -> WorkersWorld:
    keys = {"agents": AGENTS, "only_local": True, "batch_size": 1000, **keys}
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
    world.parts.confirmation.written(written)
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
    outcome = world.parts.confirmation.outcome
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
