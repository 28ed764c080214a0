"""An EnvRunner in a league: learning players come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.runner_world import RunnerWorld
from support.scripted_agents import THREE, ScriptedAgents, in_turn

from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.worker import to_json
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

AGENTS = ("red", "green")


class League(RunnerWorld):
    """One learning player, "first", with action 0; "new" chooses 1."""

    matches = 0

    def match(self, *players: str, **at_least: int) -> dict[str, training_pb2.Receipt]:
        """A round, before which there is one more line-up for each environment."""
        requests = self.requests(**at_least)
        for _ in range(2):
            self.matches += 1
            requests[0].line_ups.add(match_id=self.matches, players=players)
        self.driver.tell(*requests)
        receipts = [self.driver.hear(training_pb2.Receipt) for _ in requests]
        return {receipt.module_id: receipt for receipt in receipts}


@pytest.fixture
def envs() -> ScriptedAgents:
    return ScriptedAgents(2, dict.fromkeys(AGENTS, THREE), in_turn(AGENTS, 7))


@pytest.fixture
def world(make_world: Callable[..., League]) -> League:
    played_by = {agent: ["first"] for agent in AGENTS}
    return make_world(played_by, kind=League, row_age=0, league=True)


def acted(envs: ScriptedAgents) -> set[int]:
    episodes = [episode for slot in envs.log.values() for episode in slot]
    return {action for episode in episodes for action in episode.actions}


def test_a_player_that_learns_comes_and_goes_while_others_play(
    world: League, envs: ScriptedAgents
) -> None:
    world.begin()
    world.match("first", "first", first=0)
    assert acted(envs) == {0}
    world.add_player("new")
    steps = 0
    for _ in range(12):
        receipts = world.match("first", "new", first=0, new=1)
        steps += receipts["new"].live_steps
        if receipts["new"].live_steps:
            header, _ = world.learners["new"].batch()
            assert header.module_id == "new"
    assert steps > 0
    assert acted(envs) == {0, 1}

    world.remove_player("new")
    goes_on = []  # the episodes that it is in: steps that count as not trained
    for _ in range(30):
        receipts = world.match("first", "first", first=0)
        goes_on.append(sum(each.steps for each in receipts["first"].played))
    assert goes_on[0] > 0 == goes_on[-1]
    world.driver.tell(*world.requests(new=1))
    with pytest.raises(AssertionError, match="asked for a batch of module 'new', and acts with"):
        world.driver.hear(training_pb2.Receipt)


def test_a_player_that_is_here_is_not_added_again(world: League) -> None:
    world.begin()
    acting = to_json(world.setup.modules["first"])
    world.driver.tell(training_pb2.AddPlayer(module_id="first", config=acting))
    with pytest.raises(AssertionError, match="a player 'first' is here already"):
        world.driver.hear(attach_pb2.Done)


def test_players_that_are_here_together_draw_noise_of_their_own(
    world: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    seeded = Actor.seed

    def seed(policy: Actor, seed: int) -> None:
        seeds.append(seed)
        seeded(policy, seed)

    world.begin()
    world.match("first", "first", first=0)
    monkeypatch.setattr(Actor, "seed", seed)
    world.add_player("goes")
    world.add_player("stays")
    world.remove_player("goes")
    world.add_player("comes")
    assert len(seeds) == len(set(seeds)) == 3
