"""A checkpoint plays whole episodes of simulators, between training episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gateway_world import (
    SPACES,
    THREE,
    TWO_WAYS,
    AgentsWorld,
    GatewayWorld,
    Played,
    TinyMemory,
    TinyPolicy,
    Wandering,
    assert_recorded,
    in_threads,
    play,
    see,
)

from juggler.client import connect
from juggler.driver.checkpoint.snapshots import restores
from juggler.envrunner.evaluation import Goal
from juggler.gateway import gateway_worker
from juggler.gateway.episode_log import EpisodeLog
from juggler.gateway.simulator_evaluation import GreedyEpisodes
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Paid(Wandering):
    """Returns that no other episode has."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return observation, reward + float(self.np_random.random()), *rest


def evaluate(
    world: GatewayWorld,
    episodes: int,
    module: type[TinyPolicy] = TinyPolicy,
    most_steps: int = 0,
    goal: Goal | None = None,
) -> GreedyEpisodes:
    """Begin to evaluate weights that are not those of training."""
    world.connect().close()  # tells the spaces
    assert world.player is not None
    config = ConnectorsConfig.parse({})
    connectors, module_to_env = build_runner_pipelines(config, THREE, TWO_WAYS)
    greedy = module(THREE, TWO_WAYS)
    greedy.weight.copy_(torch.cos(torch.arange(6.0)).reshape(3, 2))
    actor = Actor(greedy, 1, 0, 0, module_to_env, connectors)
    evaluation = GreedyEpisodes({"default": actor}, episodes, most_steps, goal)
    with world._server.at_work():
        world._server.manager.evaluations.begin(evaluation)
    return evaluation


def best_actions(episode: Played, module: type[TinyPolicy]) -> list[int]:
    seen = np.array(episode.observations[: len(episode.actions)])  # [L, 3]
    if module is TinyMemory:
        seen = np.cumsum(seen, 0)
    return (seen @ np.cos(np.arange(6.0)).reshape(3, 2)).argmax(1).tolist()


def returns_of(played: list[Played], most: int | None = None) -> Any:
    return pytest.approx([sum(each.rewards) for each in played][:most], rel=1e-5)


@pytest.mark.parametrize("module", [TinyPolicy, TinyMemory])
def test_the_first_episodes_are_played_without_exploration_and_not_learned_from(
    module: type[TinyPolicy],
) -> None:
    with GatewayWorld(module, rows=1) as world:
        evaluation = evaluate(world, 5, module)
        world.ask(1000)
        played = play(world, 1, 60, kind=Paid)
        first, others = played[:5], played[5:]
        assert evaluation.is_over
        assert evaluation.played.returns == returns_of(first)
        assert evaluation.played.lengths == [len(each.rewards) for each in first]
        for episode in first:
            assert [int(each) for each in episode.actions] == best_actions(episode, module)
        assert any([*map(int, each.actions)] != best_actions(each, module) for each in others)
        with world._server.at_work():
            assert world._server.manager.evaluations.end() is evaluation
        assert_recorded([batch for batch, _ in world.batches], others)
        counted = [total for _, ended in world.batches for total, _ in ended]
        assert counted == returns_of(others, len(counted))


def test_neither_numbers_nor_recordings_of_training_have_episodes_of_an_evaluation() -> None:
    with GatewayWorld(rows=1) as world:
        evaluation = evaluate(world, 3)
        assert world.player is not None
        found: list[RecordedEpisode] = []
        policy, (_, actions) = world.player.policy, world.player.interface.spaces
        world.player.episode_log = EpisodeLog(policy, actions, found.append)
        world.ask(1000)
        with world.connect(info_names=["episode"]) as session:
            for k in range(6):
                for step in range(3):
                    over = step == 2
                    session.step(np.full(3, k), float(k), over, infos={"episode": float(k)})
        assert evaluation.is_over
        with world._server.at_work():
            told = world._server.manager.pop_played().infos["episode"]
        assert [each.mean for each in told] == [3, 4, 5]
        assert [episode.rewards.tolist() for episode in found] == [[k] * 2 for k in (3, 4, 5)]


def test_half_of_the_environments_go_on_with_training() -> None:
    with GatewayWorld(rows=1) as world:
        evaluation = evaluate(world, 8)
        world.ask(1000)
        played = [each for some in in_threads(4, lambda i: play(world, i, 60)) for each in some]
        assert len(evaluation.played.returns) == 8
        assert world.batches
        assert_recorded([batch for batch, _ in world.batches], played)
        assert world.count("steps_uncollected") == sum(evaluation.played.lengths)


def test_steps_wait_for_no_request_while_an_evaluation_plays() -> None:
    with GatewayWorld(rows=1) as world:
        evaluation = evaluate(world, 4)
        with world.connect(environments=2) as session:
            observations, nothing = np.zeros((2, 3), np.float32), np.zeros(2)
            session.step(observations, nothing, nothing > 0, nothing > 0)
            while not evaluation.is_over:
                session.step(observations, nothing + 1, nothing == 0, nothing > 0)
        assert evaluation.played.returns == [1.0] * 4


def test_an_episode_that_takes_too_long_counts_as_it_is_and_nowhere_else() -> None:
    with GatewayWorld(rows=1) as world:
        evaluation = evaluate(world, 2, most_steps=4)
        world.ask(1000)
        played = play(world, 1, 60, kind=Paid)
        assert evaluation.played.lengths == [3, 4]
        assert evaluation.played.returns[1] == pytest.approx(sum(played[1].rewards[:4]))
        counted = [total for _, ended in world.batches for total, _ in ended]
        assert counted == returns_of(played[2:], len(counted))


def test_an_episode_that_its_simulator_takes_along_is_played_again() -> None:
    with GatewayWorld(rows=1) as world:
        evaluation = evaluate(world, 3)
        with world.connect() as session:
            session.step([0.0, 0.0, 0.0])
        world.wait_for_count("sessions", 0)
        world.ask(1000)
        played = play(world, 1, 30, kind=Paid)
        assert evaluation.played.returns == returns_of(played[:3])


def test_an_evaluation_ends_once_its_goal_is_out_of_reach() -> None:
    with GatewayWorld(rows=1) as world:
        evaluation = evaluate(world, 50, goal=Goal(1e6, 0.0))
        assert not evaluation.is_over
        world.ask(1000)
        play(world, 1, 30)
        assert len(evaluation.played.returns) == 1


# Commands of the driver.


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[AgentsWorld]:
    world = AgentsWorld(tmp_path, {"all": "default"}, environments=1, alone=True)
    yield world
    world.close()


def weights_for(action: int) -> Any:
    return {"weights": {"scale": np.full((), action, np.float32)}, "connectors": {}}


def have_played(world: AgentsWorld, action: int, episodes: int, **about: Any) -> None:
    """Have the gateway evaluate weights that choose this action."""
    for module_id in world.learners:
        for part in restores(module_id, weights_for(action), {}):
            world.driver.ask(part, attach_pb2.Done)
    version = Version(1, action).message()
    world.driver.tell(training_pb2.Evaluate(episodes=episodes, version=version, **about))


def test_a_gateway_plays_one_checkpoint_after_the_other_and_answers(alone: AgentsWorld) -> None:
    with connect(alone.address, *SPACES, real_time=True) as session:
        alone.begin()
        have_played(alone, 2, episodes=3)
        have_played(alone, 1, episodes=2)
        nothing = np.zeros(2, np.float32)
        action = session.step(nothing)
        while alone.driver._answers.qsize() < 2:
            action = session.step(nothing, float(action), True, False, nothing)
    first, second = (alone.driver.hear(training_pb2.Evaluation) for _ in range(2))
    assert (first.episode_returns, first.version.update) == ([2.0] * 3, 2)
    assert (second.episode_returns, second.version.update) == ([1.0] * 2, 1)


def test_an_evaluation_that_was_given_up_is_not_played_to_its_end(alone: AgentsWorld) -> None:
    with connect(alone.address, *SPACES, real_time=True) as session:
        alone.begin()
        have_played(alone, 2, episodes=10_000, checkpoint="candidate/1")
        have_played(alone, 1, episodes=2, checkpoint="candidate/2")
        nothing = np.zeros(2, np.float32)
        while session.step(nothing, 0.0) != 2:
            session.step(nothing, 0.0, True, False, nothing)
        alone.driver.tell(training_pb2.Evaluate(checkpoint="candidate/1"))
        while alone.driver._answers.qsize() < 3:
            session.step(nothing, 0.0, True, False, nothing)
    given_up, first, second = (alone.driver.hear(training_pb2.Evaluation) for _ in range(3))
    assert not given_up.HasField("version")
    assert (first.version.update, len(first.episode_returns) < 10_000) == (2, True)
    assert (second.version.update, len(second.episode_returns)) == (1, 2)


def test_a_gateway_without_simulators_gives_an_evaluation_up(
    alone: AgentsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_worker, "RESUME_SECONDS", 0.0)
    with connect(alone.address, *SPACES):
        alone.begin()
    have_played(alone, 2, episodes=3)
    done = alone.driver.hear(training_pb2.Evaluation)
    assert (len(done.episode_returns), done.why_fewer) == (0, gateway_worker.NO_SIMULATOR)


# Several agents.

AGENTS = ("row", "column")


def rounds(
    world: AgentsWorld, length: int, episodes: int = 0, before: int = 0
) -> list[dict[str, int]]:
    """Play episodes up to an answer; return their first actions.

    For each step of episode k, which is counted on from `before`, "row" gets k and "column" 0.5.
    """
    acted: list[dict[str, int]] = []
    with world.connect(*AGENTS, real_time=True) as session:
        while len(acted) < episodes or not (episodes or world.driver._answers.qsize()):
            rewards = {"row": float(before + len(acted)), "column": 0.5}
            acted.append(session.step(dict.fromkeys(AGENTS, see(0, 0))))
            for _ in range(length - 1):
                session.step(dict.fromkeys(AGENTS, see(0, 0)), rewards)
            session.step(rewards=rewards, terminated=True)
    return acted


def test_all_agents_play_an_episode_of_an_evaluation_with_the_checkpoint(
    make_world: Callable[..., AgentsWorld],
) -> None:
    frozen = {"old": weights_for(2)}
    played_by = {"row": ["main", "old"], "column": ["main", "random"]}
    world = make_world(played_by, frozen=frozen, environments=1)
    rounds(world, 1, episodes=1)  # tells the spaces
    world.begin()
    have_played(world, 1, episodes=8)
    world.changes.wait_for(lambda: world.runner._server.manager.evaluations.running)
    acted = rounds(world, 3)
    done = world.driver.hear(training_pb2.Evaluation)
    assert done.episode_returns == [3 * (k + 0.5) for k in range(8)]
    assert done.episode_lengths == [3] * 8
    by_module = {(each.agent, each.module_id): [*each.returns] for each in done.agent_returns}
    assert {1: by_module["row", "main"], 2: by_module["row", "old"]} == {
        action: [3.0 * k for k in range(8) if acted[k]["row"] == action] for action in (1, 2)
    }
    mains = len(by_module["column", "main"])
    assert sum(each["column"] == 1 for each in acted[:8]) >= mains
    assert len(by_module["column", "random"]) == 8 - mains
    world.ask("main")
    acted += rounds(world, 3, episodes=6, before=len(acted))
    assert all(each["row"] in (0, 2) for each in acted[8:])
    counted = world.receipts("main")["main"].env_returns
    assert counted[0] == 0.5
    assert set(counted[1:]) <= {3 * (k + 0.5) for k in range(8, len(acted))}


def test_a_frozen_module_whose_first_agent_comes_in_an_evaluation_does_not_explore(
    make_world: Callable[..., AgentsWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    explored: list[bool] = []
    act = Actor.act

    def noted(self: Actor, *given: Any, **named: Any) -> Any:
        explored.append(named.get("explore", True))
        return act(self, *given, **named)

    played_by = {"row": "main", "column": "old"}
    world = make_world(played_by, frozen={"old": weights_for(2)}, environments=2)
    world.connect("row").close()  # tells the spaces of main, and none of old
    world.begin()
    have_played(world, 1, episodes=2)
    have_played(world, 1, episodes=2)  # waits for the first one
    world.changes.wait_for(lambda: world.runner._server.manager.evaluations.running)
    assert "old" not in world.runner._players
    monkeypatch.setattr(Actor, "act", noted)
    for _ in range(2):
        rounds(world, 3)
        done = world.driver.hear(training_pb2.Evaluation)
        modules = {(each.agent, each.module_id): len(each.returns) for each in done.agent_returns}
        assert modules == {("row", "main"): 2, ("column", "old"): 2}
    # By evaluation, episode, agent and step: each action of these without exploration.
    assert explored.count(False) == 2 * 2 * 2 * 3
