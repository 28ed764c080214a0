"""Players of simulators' agents are drawn when an episode begins."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.gateway_world import (
    SEEN,
    AgentsWorld,
    RawSimulator,
    break_off,
    hello_of,
    see,
)

from juggler.client import AgentsSession, GatewayError
from juggler.client.space_values import Values
from juggler.driver.checkpoint.snapshots import restores
from juggler.envrunner.multi_agent.line_up import line_ups_of
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import attach_pb2, training_pb2
from juggler.runtime.wire.v1 import simulator_pb2 as pb

AGENTS = ("row", "column")
DRAWN = {key: ["zero", "one"] for key in AGENTS}
SEED = 7  # of every runner here
OLD = {"weights": {"scale": np.full((), 2.0, np.float32)}, "connectors": {}}

Make = Callable[..., AgentsWorld]


def drawn(environment: int, episodes: int) -> list[list[str]]:
    """The line-ups of an environment's first episodes."""
    line_ups = line_ups_of(AGENTS, DRAWN, "", None)
    assert line_ups is not None
    line_ups.reset(SEED)
    return [line_ups.begin(np.array([environment])).players.tolist() for _ in range(episodes)]


def episode(session: AgentsSession, t: int, steps: int = 2) -> dict[str, int]:
    """Play an episode with simultaneous actions; return the first ones."""
    first = session.step({name: see(t, 0) for name in AGENTS})
    for step in range(1, steps):
        shown = {name: see(t, step) for name in AGENTS}
        assert session.step(shown, {"row": 1.0, "column": -1.0}) == first, "one plays to the end"
    assert session.step(rewards={"row": 2.0, "column": -2.0}, terminated=True) == {}
    return first


def test_line_ups_are_drawn_as_in_an_envrunner_and_steps_are_those_of_who_acted(
    make_world: Make,
) -> None:
    world = make_world(DRAWN, environments=2, row_age=100)
    with world.connect(*AGENTS) as session, world.connect(*AGENTS) as other:
        world.begin()
        world.learners["one"].publish(1)
        world.driver.tell(*world.requests(zero=0, one=1))
        world.ask("zero", "one", rounds=3)
        acted: Counter[tuple[int, int]] = Counter()
        for number, each in enumerate((session, other)):
            for t, players in enumerate(drawn(number, 8)):
                actions = episode(each, t)
                assert actions == {
                    name: ["zero", "one"].index(player)
                    for name, player in zip(AGENTS, players, strict=True)
                }
                acted.update((t, action) for action in actions.values())
        receipts = [receipt for _ in range(4) for receipt in world.receipts("zero", "one").values()]
    returns: dict[str, list[float]] = defaultdict(list)
    for told in (each for receipt in receipts for each in receipt.agent_returns):
        returns[told.agent] += told.returns
    assert returns.keys() == {*AGENTS}
    for name, got in returns.items():
        assert set(got) == {3.0 if name == "row" else -3.0}
    ended = [each for receipt in receipts for each in receipt.env_returns]
    assert sum(map(len, returns.values())) == 2 * len(ended)
    for receipt in receipts:
        if not receipt.live_steps:
            continue
        batch, number = world.batch(receipt.module_id), int(receipt.module_id == "one")
        live = batch.live
        assert (batch.actions[live] == number).all()
        assert all((int(t), number) in acted for t in batch.observations[..., 0][live])
        assert set(np.abs(batch.rewards[live]).tolist()) == {1.0, 2.0}


class Games:
    """Four environments in one session, whose messages have ends and beginnings together."""

    def __init__(self, world: AgentsWorld, count: int = 4) -> None:
        self._raw = RawSimulator(world.address)
        self._values = Values(space_to_message(SEEN))
        self._seq, self.count = 0, count
        hello = hello_of(*AGENTS, environments=count).ListFields()
        welcome = self._raw.greet(**{each.name: value for each, value in hello})
        assert welcome.WhichOneof("message") == "welcome", welcome

    def step(
        self, shown: Mapping[str, Any], ended: Sequence[int] = (), **rows: Any
    ) -> dict[str, list[int]]:
        self._seq += 1
        parts = [
            pb.Rows(
                agent=AGENTS.index(name),
                observations=self._values.tensors(np.asarray(seen, np.float32)),
                terminated=[each in ended for each in range(self.count)] if ended else [],
                **rows,
            )
            for name, seen in shown.items()
        ]
        answer = self._raw.step(pb.StepBatch(seq=self._seq, agents=parts))
        assert answer.WhichOneof("message") == "actions", answer
        self.policies = {AGENTS[each.agent]: each.policy for each in answer.actions.agents}
        return {
            AGENTS[each.agent]: np.frombuffer(each.actions[0].data, np.int64).tolist()
            for each in answer.actions.agents
        }


def test_a_row_that_ends_an_episode_and_begins_one_is_split_between_who_acted_and_who_acts(
    make_world: Make,
) -> None:
    world = make_world(DRAWN, environments=4, row_age=100, steps=3)
    games = Games(world)
    world.begin()
    world.learners["one"].publish(1)
    world.driver.tell(*world.requests(zero=0, one=1))
    world.ask("zero", "one", rounds=3)
    episodes = [drawn(environment, 12) for environment in range(4)]
    number = ("zero", "one")
    got: Counter[tuple[str, float]] = Counter()  # rewards by the player that acted
    mixed = changed = 0
    for t in range(12):
        # Environment e has its first t episodes behind it, each of one step.
        shown = {name: [[t, e] for e in range(4)] for name in AGENTS}
        rewards = [100.0 * t + e for e in range(4)] if t else []
        actions = games.step(shown, range(4) if t else (), rewards=rewards)
        for at, name in enumerate(AGENTS):
            players = [episodes[e][t][at] for e in range(4)]
            assert [number[each] for each in actions[name]] == players
            assert games.policies[name] == (players[0] if len({*players}) == 1 else "")
            mixed += len({*players}) > 1
            if t:
                before = [episodes[e][t - 1][at] for e in range(4)]
                changed += before != players
                got.update(zip(before, rewards, strict=True))
    assert mixed
    assert changed
    seen: Counter[tuple[str, float]] = Counter()
    for receipt in (each for _ in range(3) for each in world.receipts("zero", "one").values()):
        if receipt.live_steps:
            batch = world.batch(receipt.module_id)
            assert (batch.actions[batch.live] == number.index(receipt.module_id)).all()
            assert batch.terminated[batch.live].all()
            rewards = batch.rewards[batch.live]
            # A step's observation is that which its action was chosen for.
            t, e = batch.observations[batch.live].T  # [R] both
            assert rewards.tolist() == (100 * (t + 1) + e).tolist()
            seen.update((receipt.module_id, reward) for reward in rewards.tolist())
    assert seen
    assert not seen - got


def test_a_mapping_that_fails_ends_the_session_and_not_the_gateway(make_world: Make) -> None:
    world = make_world(DRAWN, mapping="support.gateway_world:row_alone")
    with world.connect("row") as session, world.connect(*AGENTS) as other:
        world.begin()
        world.ask("zero")
        assert session.step({"row": see(0, 0)}) == {"row": 0}
        with pytest.raises(GatewayError, match="named no module for agent 'column'"):
            other.step({name: see(0, 0) for name in AGENTS})
        world.changes.wait_for(lambda: world.counts()["sessions"] == 1)


def test_modules_that_are_not_trained_act_and_what_they_did_is_told(make_world: Make) -> None:
    played_by = {"row": "zero", "column": "random", "third": "old"}
    world = make_world(played_by, frozen={"old": OLD}, environments=1)
    with world.connect(*played_by) as session:
        ready = world.begin()
        assert [each.module_id for each in ready.modules] == ["zero"]
        world.ask("zero", rounds=5)
        chosen = set()
        for _ in range(5):
            for t in range(4):
                actions = session.step({name: see(t, 0) for name in played_by})
                assert (actions["row"], actions["third"]) == (0, 2)
                chosen.add(actions["column"])
            ends = dict.fromkeys(played_by, 3.0)
            assert session.step(rewards=ends, terminated=True) == {}
        assert chosen == {0, 1, 2}
        receipts = [world.receipts("zero")["zero"] for _ in range(5)]
    played = [each for receipt in receipts for each in receipt.played]
    assert {each.module_id for each in played} == {"random", "old"}
    for module_id in ("random", "old"):
        mine = [each for each in played if each.module_id == module_id]
        assert sum(each.steps for each in mine) == 20
        assert [x for each in mine for x in each.episode_returns] == [3.0] * 5


def test_rewards_from_before_the_first_action_are_in_returns_and_in_no_step(
    make_world: Make,
) -> None:
    world = make_world(dict.fromkeys(AGENTS, "zero"), steps=2)
    with world.connect(*AGENTS) as session:
        world.begin()
        world.ask("zero", rounds=9)
        for _ in range(3):
            session.step({"row": see(0, 0)}, {"column": 50.0})  # nothing has begun
            session.step({"row": see(1, 0)}, {"row": 1.0, "column": 5.0})
            session.step({"column": see(2, 0)}, {"row": 1.0, "column": 5.0})
            session.step(rewards={"column": 2.0}, terminated={"column": True})
            late = {"rewards": {"column": 70.0}, "terminated": {"row": True}}
            assert session.step(**late) == {}
        receipts = [world.receipts("zero")["zero"] for _ in range(2)]
    returns: dict[str, set[float]] = {}
    for receipt in receipts:
        assert set(receipt.env_returns) <= {14.0}
        for told in receipt.agent_returns:
            returns.setdefault(told.agent, set()).update(told.returns)
    assert returns == {"row": {2.0}, "column": {12.0}}
    assert {each for receipt in receipts for each in receipt.episode_returns} == {2.0, 12.0}
    rewards = [each for _ in range(2) for each in world.batch("zero").rewards.ravel().tolist()]
    assert set(rewards) <= {1.0, 2.0, 0.0}


def test_rewards_of_an_agent_that_never_acts_are_in_the_return_of_its_environment(
    make_world: Make,
) -> None:
    world = make_world(dict.fromkeys(("row", "column", "third"), "zero"), steps=2)
    with world.connect("row", "column", "third") as session:
        world.begin()
        world.ask("zero", rounds=9)
        for _ in range(3):
            session.step({"row": see(0, 0)})
            session.step({"row": see(1, 0)}, {"row": 1.0, "column": 5.0, "third": 30.0})
            third = {"rewards": {"third": 70.0}, "terminated": {"third": True}}
            session.step({"row": see(2, 0)}, **third)  # without an action
            both = {"row": 2.0, "column": 3.0}
            assert session.step(rewards=both, terminated={"row": True, "column": True}) == {}
        receipt = world.receipts("zero")["zero"]
    assert {*receipt.env_returns} == {111.0}
    told = {(each.agent, *each.returns) for each in receipt.agent_returns}
    assert {name for name, *_ in told} == {"row"}
    assert {total for _, *totals in told for total in totals} == {3.0}


def test_rewards_of_idle_agents_are_checked(make_world: Make) -> None:
    world = make_world(dict.fromkeys(AGENTS, "zero"))
    rows = pb.Rows(observations=Values(space_to_message(SEEN)).tensors(see(0, 0)[None]))
    with world.connect(*AGENTS) as session, pytest.raises(GatewayError, match="NOT_FINITE"):
        session._exchange([rows], idle=np.inf)


@pytest.mark.parametrize(("early", "code"), [([1.0, 2.0], "WRONG_SHAPE"), ([np.nan], "NOT_FINITE")])
def test_early_rewards_are_checked(make_world: Make, early: list[float], code: str) -> None:
    world = make_world(dict.fromkeys(AGENTS, "zero"))
    seen = Values(space_to_message(SEEN)).tensors(see(0, 0)[None])
    rows = pb.Rows(observations=seen, early_rewards=early)
    with world.connect(*AGENTS) as session, pytest.raises(GatewayError) as raised:
        session._exchange([rows])
    assert raised.value.code == code
    assert f"agent {AGENTS[0]!r}" in str(raised.value)


def league(make_world: Make, **keys: Any) -> AgentsWorld:
    """A league's gateway: "main" learns and chooses 0; "old" chooses 2."""
    players = {key: ["main", "old"] for key in ("column", "row")}
    keys = {"frozen": {"old": OLD}, "league": True, "environments": 2, "row_age": 100, **keys}
    return make_world(players, **keys)


def ask(world: AgentsWorld, *line_ups: tuple[int, str, str], **at_least: int) -> None:
    """Request a round with line-ups: an id, column's player and row's player."""
    requests = world.requests(**(at_least or {"main": 0}))
    for match_id, *players in line_ups:
        requests[0].line_ups.add(match_id=match_id, players=players)
    world.driver.tell(*requests)
    known = world.runner._casting.league
    ids = {each[0] for each in line_ups}
    world.changes.wait_for(lambda: ids <= {each.match_id for each in known._fresh})


def results(receipts: Mapping[str, training_pb2.Receipt]) -> dict[int, list[float]]:
    """Returns of column and row by the id of ended matches."""
    ended = [match for receipt in receipts.values() for match in receipt.matches]
    assert len({match.match_id for match in ended}) == len(ended)
    return {match.match_id: list(match.returns) for match in ended}


MAIN_OLD = {"column": 0, "row": 2}
OLD_MAIN = {"column": 2, "row": 0}


def test_a_league_assigns_who_plays_and_hears_of_each_match_once(make_world: Make) -> None:
    world = league(make_world)
    with world.connect(*AGENTS) as session:
        ready = world.begin()
        assert [(each.module_id, each.rows) for each in ready.modules] == [("main", 4)]
        ask(world, (1, "main", "old"), (2, "old", "main"))
        played = [episode(session, t) for t in range(4)]
        assert played == [MAIN_OLD, OLD_MAIN] * 2, "the newest are played again"
        receipts = world.receipts("main")
        assert results(receipts) == {1: [-3, 3], 2: [-3, 3]}
        receipt = receipts["main"]
        (others,) = receipt.played
        assert (others.module_id, others.steps) == ("old", 8)
        assert sorted(others.episode_returns) == [-3, -3, 3, 3]
        told = {each.agent: [*each.returns] for each in receipt.agent_returns}
        assert told == {"row": [3] * 4, "column": [-3] * 4}
        ask(world, (3, "main", "main"))
        assert [episode(session, t) for t in range(4, 8)] == [
            {"column": 0, "row": 0},
            MAIN_OLD,
            OLD_MAIN,
            {"column": 0, "row": 0},
        ]
        assert results(world.receipts("main")) == {3: [-3, 3]}
    batch = world.batch("main")
    assert batch.live_steps == 8
    assert sorted(map(sorted, batch.rewards.tolist())) == [[-2, -2, -1, -1], [1, 1, 2, 2]]
    assert sorted({*batch.observations[..., 0].ravel().tolist()}) == [0, 1, 2, 3]


def test_a_round_ends_when_its_module_is_in_no_line_up(make_world: Make) -> None:
    world = league(make_world)
    with world.connect(*AGENTS) as session:
        world.begin()
        ask(world, (1, "old", "old"))
        assert [episode(session, t) for t in range(4)] == [{"column": 2, "row": 2}] * 4
        receipts = world.receipts("main")
    assert (receipts["main"].live_steps, receipts["main"].dropped) == (0, "")
    assert results(receipts) == {1: [-3, 3]}


def test_the_match_of_a_session_that_breaks_is_played_by_another(make_world: Make) -> None:
    world = league(make_world, steps=3)
    with world.connect(*AGENTS) as session, world.connect(*AGENTS) as other:
        world.begin()
        ask(world, (1, "main", "old"), (2, "old", "main"), (3, "main", "main"))
        assert session.step({name: see(0, 0) for name in AGENTS}) == MAIN_OLD
        assert other.step({name: see(0, 0) for name in AGENTS}) == OLD_MAIN
        break_off(other)  # and goes on
        rewards = {"row": 9.0, "column": -9.0}
        with pytest.raises(GatewayError, match="NaN"):  # it tells an end, and shows nonsense
            session.step({name: see(np.nan, 0) for name in AGENTS}, rewards)
        assert other.step(rewards={"row": 1.0, "column": -1.0}, terminated=True) == {}
        assert episode(other, 1) == MAIN_OLD, "match 1"
        assert episode(other, 2) == {"column": 0, "row": 0}
        episode(other, 3)
        receipts = world.receipts("main")
        assert results(receipts) == {1: [-3, 3], 2: [-1, 1], 3: [-3, 3]}
    counts = world.counts()
    assert (counts["sessions_failed"], counts["sessions_resumed"]) == (1, 1)
    assert not world.runner._casting.league._playing


def test_players_come_and_go_while_simulators_play(make_world: Make) -> None:
    world = league(make_world)
    with world.connect(*AGENTS) as session:
        world.begin()
        world.add_player("new")  # chooses 1
        ask(world, (1, "new", "main"), (2, "new", "new"), main=0, new=1)
        assert episode(session, 0) == {"column": 1, "row": 0}
        assert session.step({name: see(1, 0) for name in AGENTS}) == {"column": 1, "row": 1}
        world.driver.tell(training_pb2.RemovePlayer(module_id="new"))
        assert world.receipts("new")["new"].dropped == "learner_lost"
        world.driver.hear(attach_pb2.Done)
        assert session.step({name: see(1, 1) for name in AGENTS}) == {"column": 1, "row": 1}
        assert "new" in world.runner._players
        with world.connect(*AGENTS) as late:
            assert episode(late, 2) == {"column": 0, "row": 0}, "nothing else is left"
            assert session.step(rewards=dict.fromkeys(AGENTS, 5.0), terminated=True) == {}
            world.changes.wait_for(lambda: "new" not in world.runner._players)
            episode(late, 3)
        assert results(world.receipts("main")) == {1: [-3, 3], 2: [5, 5]}
        world.add_player("newer")
        ask(world, (3, "newer", "main"), main=0, newer=1)
        assert episode(session, 4) == {"column": 1, "row": 0}


def test_a_simulator_without_all_agents_of_a_league_is_refused(make_world: Make) -> None:
    world = league(make_world)
    with pytest.raises(GatewayError, match="agents 'column' and 'row', and the simulator 'row'"):
        world.connect("row")


MAIN_MAIN = {"column": 1, "row": 1}  # with weights of update 1


def evaluate(world: AgentsWorld, episodes: int, **actions: int) -> None:
    """Have the gateway evaluate weights that choose these actions."""
    for module_id, action in actions.items():
        tree = {"weights": {"scale": np.full((), action, np.float32)}, "connectors": {}}
        for part in restores(module_id, tree, {}):
            world.driver.ask(part, attach_pb2.Done)
    version = Version(1, max(actions.values())).message()
    world.driver.tell(training_pb2.Evaluate(episodes=episodes, version=version))


def test_the_first_player_of_a_league_plays_evaluations_beside_the_matches(
    make_world: Make,
) -> None:
    world = league(make_world, steps=2, environments=4)
    with world.connect(*AGENTS) as session, world.connect(*AGENTS) as other:
        world.begin()
        ask(world, (1, "main", "old"), (2, "old", "main"), main=0)
        evaluate(world, 2, main=1)
        world.changes.wait_for(lambda: world.runner._server.manager.evaluations.running)
        assert session.step({name: see(0, 0) for name in AGENTS}) == MAIN_MAIN
        assert episode(other, 1) == {"column": 0, "row": 2}, "match 1, as half may play"
        assert session.step(rewards={"row": 3.0, "column": -3.0}, terminated=True) == {}
        assert episode(session, 2) == MAIN_MAIN
        done = world.driver.hear(training_pb2.Evaluation)
        assert episode(session, 3, steps=3) == {"column": 2, "row": 0}, "match 2"
        receipts = world.receipts("main")
    assert (done.version.update, [*done.episode_lengths]) == (1, [1, 2])
    returns = {(each.agent, each.module_id): [*each.returns] for each in done.agent_returns}
    assert returns == {("row", "main"): [3.0, 3.0], ("column", "main"): [-3.0, -3.0]}
    assert results(receipts) == {1: [-3, 3], 2: [-4, 4]}
    told = {each.agent: [*each.returns] for each in receipts["main"].agent_returns}
    assert told == {"row": [3, 4], "column": [-3, -4]}, "of the matches alone"
    assert {*world.batch("main").observations[..., 0].ravel().tolist()} <= {0.0, 1.0, 3.0}


def test_an_evaluation_ends_with_its_player_and_the_next_one_is_played_by_another(
    make_world: Make,
) -> None:
    world = league(make_world)
    with world.connect(*AGENTS, real_time=True) as session:
        world.begin()
        world.add_player("new")  # chooses 1
        for _ in range(2):  # the second one waits, and has no player any more
            evaluate(world, 5, main=0, new=1)
        evaluations = world.runner._server.manager.evaluations
        world.changes.wait_for(
            lambda: evaluations.running is not None and len(world.runner._evaluations) == 2
        )
        assert episode(session, 0) == {"column": 0, "row": 0}
        assert session.step({name: see(1, 0) for name in AGENTS}) == {"column": 0, "row": 0}
        world.driver.tell(training_pb2.RemovePlayer(module_id="main"))
        answers = [world.driver._answers.get(timeout=60) for _ in range(3)]
        given_up = [each for each in answers if isinstance(each, training_pb2.Evaluation)]
        assert [[*each.episode_returns] for each in given_up] == [[0.0], []]
        assert all("'main' left" in each.why_fewer for each in given_up)
        assert session.step(rewards=dict.fromkeys(AGENTS, 5.0), terminated=True) == {}
        world.changes.wait_for(lambda: "main" not in world.runner._players)
        evaluate(world, 1, main=0, new=1)
        world.changes.wait_for(lambda: world.runner._server.manager.evaluations.running)
        assert episode(session, 2) == MAIN_MAIN
        done = world.driver.hear(training_pb2.Evaluation)
        assert [each.module_id for each in done.agent_returns] == ["new", "new"]
