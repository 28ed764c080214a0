"""Players are drawn once an episode; those of leagues come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.runner_world import RunnerWorld
from support.scripted_agents import (
    THREE,
    Collected,
    Forgetful,
    ScriptedAgents,
    by_slot,
    in_turn,
    sampler_of,
)

from juggler.envrunner.evaluation import play_whole_episodes
from juggler.envrunner.multi_agent.line_up import DrawnLineUps, LineUp, LineUpError, line_ups_of
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.worker import to_json
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

AGENTS = ("red", "green")
BOTH = {"red": ["main", "old"], "green": ["main", "old"]}


def uniform(played_by: Mapping[str, Any] = BOTH) -> DrawnLineUps:
    line_ups = line_ups_of(AGENTS, played_by, "", None)
    assert line_ups is not None
    return line_ups


def drawn_by(who_plays: Callable[..., Any]) -> DrawnLineUps:
    line_ups = line_ups_of(AGENTS, BOTH, "my_file:choose", {"my_file:choose": who_plays})
    assert line_ups is not None
    return line_ups


class Kept(DrawnLineUps):
    """Keeps all that were drawn, by slot, in order."""

    drawn: dict[int, list[str]]

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.drawn = {}

    def begin(self, envs: NDArray[np.intp]) -> LineUp:
        line_up = super().begin(envs)
        for slot, player in zip(line_up.slots.tolist(), line_up.players.tolist(), strict=True):
            self.drawn.setdefault(slot, []).append(player)
        return line_up


def kept() -> Kept:
    draws = uniform()
    return Kept(AGENTS, BOTH, draws._who_plays, "agents")


# -- the draw -------------------------------------------------------------------------------------


def test_an_episode_has_the_same_line_up_whatever_other_environments_do() -> None:
    one, two = uniform(), uniform()
    one.reset(5)
    two.reset(5)
    first = [one.begin(np.array([0, 1])).players.tolist() for _ in range(50)]
    alone = [two.begin(np.array([1])).players.tolist() for _ in range(50)]
    assert [both[2:] for both in first] == alone
    two.reset(6)
    assert [two.begin(np.array([1])).players.tolist() for _ in range(50)] != alone
    two.reset(5)
    assert [two.begin(np.array([1])).players.tolist() for _ in range(50)] == alone


def test_every_module_of_a_list_is_drawn_as_often_as_it_is_there() -> None:
    line_ups = uniform({"red": ["main", "main", "old"], "green": "main"})
    players = np.array([line_ups.begin(np.array([0])).players for _ in range(3000)])
    assert set(players[:, 1]) == {"main"}
    assert abs((players[:, 0] == "main").mean() - 2 / 3) < 0.04


def test_a_function_gets_all_agents_at_once_and_a_generator_of_the_episode() -> None:
    seen: list[Any] = []

    def one_of_them(agents: Sequence[str], rng: np.random.Generator) -> dict[str, str]:
        seen.append((tuple(agents), rng.integers(1 << 40)))
        main = agents[int(rng.integers(2))]
        return {agent: "main" if agent == main else "old" for agent in agents}

    line_ups = drawn_by(one_of_them)
    players = [line_ups.begin(np.array([0])).players.tolist() for _ in range(40)]
    assert {tuple(sorted(pair)) for pair in players} == {("main", "old")}
    assert len({tuple(pair) for pair in players}) == 2
    assert {agents for agents, _ in seen} == {AGENTS}
    assert len({number for _, number in seen}) == 40


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"red": "main"}, "named no module for agent 'green'"),
        ({"red": "mian", "green": "old"}, "mapped agent 'red' to 'mian'"),
        ({"red": "main", "green": ["old"]}, "mapped agent 'green' to ['old']"),
        ({"red": "main", "green": "old", "blue": "old"}, "mapped 'blue', and the environment has"),
        (["main", "old"], "returned a list: it must return"),
        (None, "returned a NoneType"),
    ],
)
def test_a_wrong_line_up_is_one_sentence_with_the_function_and_the_agent(
    said: Any, words: str
) -> None:
    with pytest.raises(LineUpError) as wrong:
        drawn_by(lambda agents, rng: said).begin(np.array([0]))
    assert str(wrong.value).startswith("mapping 'my_file:choose' ")
    assert words in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_what_a_function_raises_is_told_with_its_name() -> None:
    def broken(agents: Sequence[str], rng: np.random.Generator) -> dict[str, str]:
        raise KeyError("league")

    with pytest.raises(LineUpError, match="mapping 'my_file:choose' raised"):
        drawn_by(broken).begin(np.array([0]))


def test_a_function_that_is_not_there_is_told_by_name() -> None:
    with pytest.raises(ValueError, match="mapping 'math:who_plays': the Python module 'math' has"):
        line_ups_of(AGENTS, BOTH, "math:who_plays", None)


# -- in a sampler ---------------------------------------------------------------------------------


def every_agent_acts(seed: int) -> ScriptedAgents:
    return ScriptedAgents(3, dict.fromkeys(AGENTS, THREE), in_turn(AGENTS, 5 + seed))


@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_with_the_module_that_was_drawn_for_its_episode(seed: int) -> None:
    envs, line_ups = every_agent_acts(seed), kept()
    sampler = sampler_of(envs, BOTH, steps=4, line_ups=line_ups, seed=seed)
    collected = Collected(sampler)
    for _ in range(60):
        collected.play("main", "old")
    count = 0
    for module_id in ("main", "old"):
        for (slot, number), steps in by_slot(collected.batches[module_id]).items():
            assert line_ups.drawn[slot][number] == module_id
            episode = envs.log[slot][number]
            assert [step[0] for step in steps] == list(range(len(steps)))
            assert [step[1] for step in steps] == episode.actions[: len(steps)]
            np.testing.assert_allclose(
                [step[2] for step in steps], episode.rewards()[: len(steps)], atol=1e-6
            )
            count += len(steps)
        expected = [
            (sum(episode.rewards()), len(episode.actions))
            for slot, episodes in envs.log.items()
            for number, episode in enumerate(episodes)
            if episode.end and line_ups.drawn[slot][number] == module_id
        ]
        assert sorted(collected.ended[module_id]) == sorted(expected)
    made = sum(len(episode.actions) for episodes in envs.log.values() for episode in episodes)
    # At most one row is under way for each slot and module that may play it.
    assert 0 <= made - count <= 4 * 2 * 6


def test_an_agents_returns_keep_the_order_of_its_episodes() -> None:
    envs, line_ups = every_agent_acts(0), kept()
    sampler = sampler_of(envs, BOTH, steps=60, line_ups=line_ups)
    played = sampler.sample(["main", "old"], {})
    assert {*played.agent_returns} == {(agent, "") for agent in envs.agents}
    total = np.sum([*played.agent_returns.values()], 0)
    assert total.tolist() == pytest.approx(played.env_returns)
    assert len(played.env_returns) > 5


def test_whole_episodes_are_played_by_who_was_drawn() -> None:
    envs, line_ups = every_agent_acts(0), kept()
    sampler = sampler_of(envs, BOTH, steps=4, module=Forgetful, line_ups=line_ups)
    modules = list(sampler._modules.values())
    played = play_whole_episodes(envs, modules, 12, seed=3, line_ups=line_ups)
    first = line_ups.drawn
    assert len(played.returns) == 12
    assert {module_id for _, module_id in played.agent_returns} == {"main", "old"}
    assert {player for players in first.values() for player in players} == {"main", "old"}
    again = play_whole_episodes(envs, modules, 12, seed=3, line_ups=line_ups)
    assert (again.returns, line_ups.drawn) == (played.returns, first)


# An EnvRunner in a league: learning players come and go.


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
