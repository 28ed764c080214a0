"""Steps of simulators' agents become batches of their modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from support.gateway_world import SPACES, THREE_WAYS, AgentsWorld, see

from juggler.client import GatewayError, connect, connect_agents, play_agents
from juggler.client.space_values import Values, as_message
from juggler.envrunner.multi_agent.matrix_game import MatrixGame
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.v1 import simulator_pb2 as pb

TWO = {"row": "rows", "column": "columns"}


@pytest.fixture
def world(make_world: Callable[..., AgentsWorld]) -> AgentsWorld:
    """A gateway for a game of two modules."""
    return make_world(TWO)


def test_two_modules_learn_from_a_game_in_which_both_act_at_once(world: AgentsWorld) -> None:
    with world.connect("row", "column") as session:
        ready = world.begin()
        assert {each.module_id: each.rows for each in ready.modules} == {"rows": 1, "columns": 1}
        world.learners["columns"].publish(2)  # chooses 2, and the other module 0
        world.driver.tell(*world.requests(rows=0, columns=2))
        rewards: dict[str, float] = {}
        for t in range(5):
            shown = {"row": see(t, 0), "column": see(t, 1)}
            over = t == 4
            actions = session.step(shown, rewards, over)
            assert actions == ({} if over else {"row": 0, "column": 2})
            rewards = {"row": 1.0 + t, "column": -1.0 - t}
        receipts = world.receipts("rows", "columns")
        assert session.versions == {"row": (1, 0), "column": (1, 2)}
    for number, (module_id, sign) in enumerate((("rows", 1), ("columns", -1))):
        batch, receipt = world.batch(module_id), receipts[module_id]
        assert batch.live_steps == receipt.live_steps == 4
        assert batch.rewards.tolist() == [[sign * 1, sign * 2, sign * 3, sign * 4]]
        assert batch.actions.tolist() == [[2 * number] * 4]
        assert batch.observations[0, :, 0].tolist() == [0, 1, 2, 3]
        assert (batch.observations[0, :, 1] == number).all()
        assert batch.terminated.tolist() == [[False, False, False, True]]
        assert list(receipt.episode_returns) == [sign * 10]
    told = [each for each in receipts.values() if each.env_returns]
    assert [(list(each.env_returns), list(each.env_lengths)) for each in told] == [([0.0], [4])]


def test_rewards_between_two_turns_of_an_agent_add_up_to_its_step(world: AgentsWorld) -> None:
    names = "row", "column"
    with world.connect(*names) as session:
        world.begin()
        world.ask("rows", "columns")
        for ply in range(9):
            name, rewards = names[ply % 2], {"row": 1.0, "column": 10.0 * ply}
            with pytest.raises(ValueError, match=r"\[3\]"):  # a refused call counts nowhere
                session.step({name: see(ply, 0, 0)}, rewards)
            actions = session.step({name: see(ply, 0)}, rewards)
            assert actions.keys() == {name}
        assert session.step(rewards={"row": 100.0}, terminated=True) == {}
        receipts = world.receipts(*dict.fromkeys(TWO.values()))
    rows, columns = world.batch("rows"), world.batch("columns")
    assert rows.rewards.tolist() == [[2, 2, 2, 2]]
    assert columns.rewards.tolist() == [[50, 90, 130, 80]]
    assert columns.terminated.tolist() == [[False] * 3 + [True]]
    assert rows.observations[0, :, 0].tolist() == [0, 2, 4, 6]
    assert columns.observations[0, :, 0].tolist() == [1, 3, 5, 7]
    # The episode had a fifth action of row, which is in its next row.
    told = [list(each.env_returns) for each in receipts.values() if each.env_returns]
    # Before its first action, column got 10, which no step has.
    assert told == [[8 + 100 + 10 + 350]]


def test_a_round_is_over_when_one_module_has_two_batches(world: AgentsWorld) -> None:
    with world.connect("row", "column") as session:
        world.begin()
        world.ask("rows", "columns", rounds=2)
        session.step({"column": see(0, 0)})
        for t in range(9):
            session.step({"row": see(t, 0)})
        first = world.receipts("rows", "columns")
        assert (first["rows"].live_steps, first["columns"].live_steps) == (4, 0)
        assert not first["columns"].dropped
        for t in range(9, 13):
            session.step({"row": see(t, 0)})
        second = world.receipts("rows", "columns")
        assert (second["rows"].live_steps, second["columns"].live_steps) == (4, 0)
    assert world.batch("rows").observations[0, :, 0].tolist() == [0, 1, 2, 3]
    assert world.batch("rows").observations[0, :, 0].tolist() == [4, 5, 6, 7]


def test_a_module_without_a_share_in_a_round_acts_and_is_not_recorded(world: AgentsWorld) -> None:
    with world.connect("row", "column") as session:
        world.begin()
        world.ask("rows")
        for t in range(5):
            both = {"row": see(t, 0), "column": see(t, 0)}
            assert session.step(both, {"row": 1, "column": 1}).keys() == both.keys()
        assert world.receipts("rows")["rows"].live_steps == 4
        assert world.counts()["steps_uncollected"] == 4
        world.ask("columns")
        for t in range(5):
            session.step({"column": see(t, 0)}, {"column": 2})
        receipt = world.receipts("columns")["columns"]
        assert receipt.live_steps == 4
    assert world.batch("columns").rewards.tolist() == [[2, 2, 2, 2]]


def test_people_are_told_once_of_modules_that_act_in_torch(
    make_world: Callable[..., AgentsWorld],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RLModule, "note", "Scaled acts in torch from now on")
    world = make_world(TWO)
    with world.connect("row", "column") as session:
        world.begin()
        world.ask("rows", "columns", rounds=2)
        for t in range(9):
            session.step({"row": see(t, 0), "column": see(t, 0)}, {"row": t, "column": t})
        for _ in range(2):
            world.receipts("rows", "columns")
    said = [world.notes.get() for _ in range(world.notes.qsize())]
    (note,) = [each for each in said if "acts in torch" in each]
    assert note == "Scaled acts in torch from now on"


def test_a_gateway_is_ready_when_every_module_has_agents(world: AgentsWorld) -> None:
    with world.connect("row"):
        assert (
            world.notes.get(timeout=30) == "has agents of module rows; waits for those of columns"
        )
        with connect_agents(world.address, {"column": (THREE_WAYS, THREE_WAYS)}):
            ready = {each.module_id: each for each in world.begin().modules}
    assert list(ready["rows"].observation_space.box.shape) == [2]
    assert ready["columns"].environment_observation_space.discrete.n == 3


@pytest.mark.parametrize(
    ("continues", "episodes"), [(True, [(3.0, 2)] * 4), (False, [(1.0, 1), (2.0, 1)] * 4)]
)
def test_an_episode_may_continue_with_others_when_all_who_acted_in_it_have_ended(
    world: AgentsWorld, continues: bool, episodes: list[tuple[float, int]]
) -> None:
    with world.connect("row", "column") as session:
        world.begin()
        world.ask("rows", "columns")
        for t in range(4):
            assert session.step({"row": see(t, 0)}).keys() == {"row"}
            over = {"rewards": {"row": 1.0}, "terminated": {"row": True}}
            assert session.step({"column": see(t, 0)}, **over, continues=continues)
            last = {"rewards": {"column": 2.0}, "terminated": {"column": True}}
            assert session.step(**last) == {}
        receipts = world.receipts("rows", "columns")
    told = [
        episode
        for each in receipts.values()
        for episode in zip(each.env_returns, each.env_lengths, strict=True)
    ]
    assert told == episodes
    for module_id in ("rows", "columns"):
        assert world.batch(module_id).terminated.tolist() == [[True] * 4]


def test_an_end_that_is_held_back_is_sent_when_the_session_is_closed(world: AgentsWorld) -> None:
    with world.connect("row", "column") as session:
        world.begin()
        world.ask("rows", "columns")
        for t in range(4):
            session.step({"row": see(t, 0)})
            over = {"rewards": {"row": 1.0}, "terminated": {"row": True}}
            session.step({"column": see(t, 0)}, **over, continues=True)
            last = {"rewards": {"column": 2.0}, "terminated": {"column": True}}
            assert session.step(**last, continues=t == 3) == {}
    receipts = world.receipts("rows", "columns")
    assert [x for each in receipts.values() for x in each.env_returns] == [3.0] * 4
    assert world.batch("columns").terminated.tolist() == [[True] * 4]


def test_a_mark_for_an_environment_that_is_not_there_ends_the_session(
    make_world: Callable[..., AgentsWorld],
) -> None:
    said = pytest.raises(GatewayError, match=r"environment 1: ")
    rows = pb.Rows(observations=Values(as_message(SPACES[0])).tensors(see(0, 0)[None]))
    with make_world(TWO).connect("row", "column") as session, said:
        session._exchange([rows], continuing=[1])


def test_a_client_without_names_acts_where_the_table_has_one_pattern(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"player_*": "both"})
    with connect(world.address, *SPACES) as session:
        world.begin()
        world.ask("both")
        for t in range(5):
            assert session.step(see(t, t), 1.0) == 0
        receipt = world.receipts("both")["both"]
        assert receipt.live_steps == 4
        assert world.batch("both").rewards.tolist() == [[1, 1, 1, 1]]


def test_a_game_with_a_known_interface_plays_in_one_line(world: AgentsWorld) -> None:
    with connect_agents(
        world.address, {n: (MatrixGame().observation_space(n), THREE_WAYS) for n in TWO}
    ):
        world.begin()
    world.ask("rows", "columns", rounds=3)
    returns = play_agents(MatrixGame([[1, 0, 0]] * 3, [[5, 0, 0]] * 3), world.address, episodes=8)
    assert returns == [{"row": 1.0, "column": 5.0}] * 8
    receipts = world.receipts("rows", "columns")
    assert receipts["columns"].live_steps == 4
    assert world.batch("columns").rewards.tolist() == [[5, 5, 5, 5]]


def test_a_module_that_fails_to_close_leaves_the_others_to_close(
    make_world: Callable[..., AgentsWorld],
) -> None:
    closed: list[str] = []

    def fail(module_id: str) -> None:
        closed.append(module_id)
        raise MemoryError

    world = make_world(TWO)
    with world.connect("row", "column"):
        world.begin()
    world.close()
    for module_id, module in world.runner._players.items():
        module.streams.close = partial(fail, module_id)
        module._writer = SimpleNamespace(close=partial(fail, f"writer of {module_id}"))
    with pytest.raises(MemoryError):
        world.runner.close()
    assert {*closed} == {"rows", "columns", "writer of rows", "writer of columns"}


def test_a_client_says_what_it_cannot_send(world: AgentsWorld) -> None:
    with world.connect("row", "column") as session:
        world.begin()
        world.ask("rows", "columns")
        with pytest.raises(ValueError, match="'raw'"):
            session.step({"raw": see(0, 0)})
        session.step({"row": see(0, 0)})
        with pytest.raises(ValueError, match="'row'"):
            session.step(truncated=True)
        with pytest.raises(ValueError, match=r"'column'.*\[3\]"):
            session.step({"column": see(0, 0, 0)})
    with pytest.raises(ValueError, match="agents"):
        connect_agents(world.address, {})
