"""What simulators, receipts and people are told: infos, seeds, connections."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.gateway_world import (
    THREE,
    TWO_WAYS,
    AgentsWorld,
    GatewayWorld,
    RawSimulator,
    break_off,
    see,
    steps_of,
)

from juggler.client import GatewayError, box, connect, connect_agents, discrete, play
from juggler.envrunner.info_numbers import MOST_EPISODES, MOST_NUMBERS, InfoNumber, InfoNumbers
from juggler.gateway import recordings
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.session_manager import ConnectionLog, address_of
from juggler.gateway.sessions import Sessions
from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1.tensors_pb2 import DType

NAN = float("nan")


#: The model of the policy that all these gateways have: an export takes seconds.
EXPORTED: list[Any] = []


def exported_once(graph: ActingGraph, optimize: bool) -> Any:
    if not EXPORTED:
        EXPORTED.append(to_onnx(graph, optimize).model_proto)
    (model,) = EXPORTED
    return SimpleNamespace(model_proto=copy.deepcopy(model))  # its owner takes its weights out


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayWorld]:
    monkeypatch.setattr(recordings, "to_onnx", exported_once)
    with GatewayWorld(rows=1, steps=4) as world:
        world.ask(1000)
        yield world


def taken(world: GatewayWorld) -> InfoNumbers:
    with world._server.at_work():
        return world._server.manager.pop_played().infos


def test_an_episode_that_another_one_follows_without_an_end_is_told(world: GatewayWorld) -> None:
    world.use(0.4, Version(1, 0))
    with world.connect(mode="local", pull=False, info_names=["x"]) as session:
        version = session.version
    greeting = {"mode": pb.LOCAL_INFERENCE, "info_names": ["x"]}
    with RawSimulator(world.address) as simulator:
        simulator.greet(**greeting)
        shown = steps_of(1, np.ones((3, 3))).agents[0].observations
        acted = pb.NamedTensor(dtype=DType.DTYPE_INT64, shape=[2], data=bytes(16))
        for seq, infos in enumerate(([1.0, 3.0], [], [5.0, NAN]), 1):
            recording = pb.Recording(
                seq=seq,
                starts=seq != 2,
                terminated=seq == 3,
                observations=shown,
                actions=[acted],
                rewards=[1, 1],
                action_logp=[-1, -1],
                version=pb.PolicyVersion(generation=version[0], update=version[1]),
                infos=infos,
            )
            simulator.send(recording=recording)
            assert simulator.hear().recorded.seq == seq
        assert taken(world) == {"x": [InfoNumber(2.0, 1.0, 3.0), InfoNumber(5.0, 5.0, 5.0)]}


def test_of_many_numbers_the_first_are_kept_and_of_many_episodes_the_newest(
    world: GatewayWorld,
) -> None:
    for k in range(5):
        names = [f"{k} {each}" for each in range(32)]
        with world.connect(info_names=names) as session:
            session.step(np.zeros(3))
            session.step(np.zeros(3), 1.0, True, infos=dict.fromkeys(names, 1.0))
    world.wait_for_count("sessions", 0)
    found = taken(world)
    assert len(found) == MOST_NUMBERS
    assert not any(name.startswith("4 ") for name in found)
    with world.connect(info_names=["k"]) as session:
        session.step(np.zeros(3))
        for k in range(MOST_EPISODES + 20):
            session.step(np.zeros(3), 1.0, True, False, np.zeros(3), infos={"k": float(k)})
        episodes = taken(world)["k"]
    assert [each.mean for each in episodes] == list(range(20, MOST_EPISODES + 20))


def test_a_session_that_goes_on_has_the_names_that_it_began_with(world: GatewayWorld) -> None:
    with world.connect(info_names=["x"]) as session:
        session.step(np.zeros(3))
        session.step(np.zeros(3), infos={"x": 1.0})
        break_off(session)
        session.step(np.zeros(3), 0.0, True, infos={"x": 5.0})
        assert taken(world) == {"x": [InfoNumber(3.0, 1.0, 5.0)]}
        token = session.welcome.resume_token
        with RawSimulator(world.address) as other:
            error = other.greet(resume_token=token, info_names=["x", "y"]).error
        assert error.code == pb.Error.WRONG_SPACES
        assert "other info_names: send the hello that it began with" in error.message
        session.step(np.zeros(3))


def test_the_infos_of_a_gymnasium_environment_are_told(world: GatewayWorld) -> None:
    class Counts(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            self.t = getattr(self, "t", 0) + 1
            return *self.env.step(action)[:4], {"t": self.t, "text": "no number"}

    class Short(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, **_: Any) -> Any:
            self.left = 2
            return np.zeros(3, np.float32), {"t": -1}

        def step(self, action: Any) -> Any:
            self.left -= 1
            return np.zeros(3, np.float32), 1.0, self.left == 0, False, {}

    assert play(Counts(Short()), world.address, episodes=2, info_names=["t"]) == [2, 2]
    assert taken(world) == {"t": [InfoNumber(1.5, 1.0, 2.0), InfoNumber(3.5, 3.0, 4.0)]}


def test_a_client_says_which_number_is_none(world: GatewayWorld) -> None:
    with world.connect(info_names=["x"]) as session:
        with pytest.raises(ValueError, match="x"):
            session.step(np.zeros(3), infos={"x": [1.0, 2.0]})
        session.step(np.zeros(3))
    with pytest.raises(GatewayError, match="NOT_SERVED"):
        world.connect(mode="logged", info_names=["x"])


def test_a_text_in_place_of_a_list_of_names_is_refused() -> None:
    """Its letters were taken for names, and no number arrived."""
    spaces = box([3]), discrete(2)
    with pytest.raises(TypeError, match="left"):
        connect("127.0.0.1:1", *spaces, info_names="left")
    with pytest.raises(TypeError, match="left"):
        connect_agents("127.0.0.1:1", {"a": spaces}, info_names="left")


def test_numbers_of_several_agents_are_named_after_them(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"row": "both", "column": "both"}, environments=2)
    with world.connect("row", "column", info_names=["x", "y"]) as session:
        world.begin()
        world.ask("both")
        session.step({"row": see(0, 0)}, infos={"row": {"x": 100.0}})  # of no action
        session.step({"column": see(0, 0)}, infos={"row": {"x": 1.0, "z": "none"}})
        both = {"row": see(0, 0), "column": see(0, 0)}
        session.step(both, infos={"row": {"y": 2.0}, "column": {"x": 3.0}})
        ended = {"row": True}, False, {"row": {"x": 5.0}}
        session.step({"column": see(0, 0)}, None, *ended)
        for step in range(6):
            session.step({"column": see(0, 0)}, infos={"column": {"x": float(step)}})
        with world.runner._server.at_work():
            assert world.runner._server.manager.pop_played().infos == {}, "the episode goes on"
        session.step(terminated=True, infos={"column": {"y": 9.0}})
        for _ in range(10):  # fills the batch
            session.step({"row": see(0, 0)})
        receipt = world.receipts("both")["both"]
    told = {
        each.name: (list(each.mean), list(each.least), list(each.most)) for each in receipt.infos
    }
    assert told == {
        "row/x": ([3.0], [1.0], [5.0]),
        "row/y": ([2.0], [2.0], [2.0]),
        "column/x": ([18 / 7], [0.0], [5.0]),
        "column/y": ([9.0], [9.0], [9.0]),
    }


def test_a_number_that_is_named_as_that_of_an_agent_of_other_sessions_is_refused(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"row": "both", "row/left": "both"}, environments=2)
    with world.connect("row/left", info_names=["x"]):
        with pytest.raises(GatewayError, match="'left/x'"):
            world.connect("row", info_names=["left/x"])
        world.connect("row", info_names=["leftmost/x", "right/x", "x"]).close()


# Simulators get seeds and parameters for the episodes that begin.


WIND = {"wind": 0.5, "gravity": [(10, 1.0), (20, 3.0)]}


@pytest.mark.parametrize(
    ("steps", "gravity"), [(0, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (99, 3.0)]
)
def test_schedules_are_linear_between_their_points(steps: int, gravity: float) -> None:
    assert Curriculum(0, WIND, steps).parameters == {"wind": 0.5, "gravity": gravity}


def test_sessions_of_a_run_have_seeds_that_follow_from_its_own() -> None:
    def seeds(run: int, *dialed: str) -> list[int]:
        curriculum = Curriculum(run)
        curriculum.own = ["one", "two"]
        return [curriculum.session_seed(each) for each in dialed]

    ours = seeds(7, "one", "two", "elsewhere", "one", "elsewhere")
    assert len({*ours}) == 5
    assert all(0 <= seed < 2**31 for seed in ours)
    assert seeds(7, "two", "elsewhere", "one") == [ours[1], ours[2], ours[0]]
    assert seeds(8, "one") != ours[:1]


def test_each_episode_of_each_environment_has_a_seed_of_its_own() -> None:
    with GatewayWorld() as world, world.connect(environments=3) as session:
        first = session.welcome.seed
        assert [session.next_seed(each) for each in (0, 1, 2, 1, 1, 0)] == [
            first, first + 1, first + 2, first + 4, first + 7, first + 3
        ]  # fmt: skip
        session.welcome.ClearField("seed")
        assert session.next_seed() is None, "a gateway of an earlier version"


def test_parameters_come_with_the_welcome_and_when_they_have_changed() -> None:
    curriculum = Curriculum(0, WIND)
    with GatewayWorld(curriculum=curriculum) as world, RawSimulator(world.address) as simulator:
        world.ask(100)
        assert dict(simulator.greet().welcome.parameters) == {"wind": 0.5, "gravity": 1.0}
        assert not simulator.step(steps_of(1)).actions.parameters
        curriculum.follow(9)
        assert not simulator.step(steps_of(2)).actions.parameters, "they are the same"
        curriculum.follow(15)
        answer = simulator.step(steps_of(3)).actions
        assert dict(answer.parameters) == {"wind": 0.5, "gravity": 2.0}
        assert answer.agents[0].actions[0].shape == [1]
        assert not simulator.step(steps_of(4)).actions.parameters


def test_a_session_that_is_resumed_has_the_parameters_of_now_and_its_seed() -> None:
    curriculum = Curriculum(0, WIND)
    with GatewayWorld(curriculum=curriculum) as world, world.connect() as session:
        world.ask(100)
        session.step(see(0, 0, 0))
        seed = session.welcome.seed
        curriculum.follow(15)
        break_off(session)
        session.step(see(0, 0, 0))
        assert session.welcome.resumed
        assert session.welcome.seed == seed
        assert session.parameters == {"wind": 0.5, "gravity": 2.0}


def test_simulators_that_record_have_them_too() -> None:
    curriculum = Curriculum(0, WIND)
    with GatewayWorld(curriculum=curriculum) as world, world.connect(mode="logged") as session:
        world.ask(100)
        curriculum.follow(30)
        session.record(np.zeros((5, 3)), [0] * 4, [1.0] * 4, [-0.7] * 4, terminated=True)
        session.flush()
        assert session.parameters == {"wind": 0.5, "gravity": 3.0}


class Remembers(gymnasium.Env[Any, Any]):
    """Episodes of two steps."""

    observation_space, action_space = THREE, TWO_WAYS

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        self.resets.append(given)
        self.steps = 0
        return see(0, 0, 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return see(0, 0, 1), 1.0, self.steps == 2, False, {}


def test_an_environment_of_gymnasium_is_reset_with_both() -> None:
    env = Remembers()
    with GatewayWorld(curriculum=Curriculum(3, WIND)) as world:
        world.ask(100)
        assert play(env, world.address, episodes=2) == [2.0, 2.0]
    options = {"wind": 0.5, "gravity": 1.0}
    assert env.resets == [
        {"seed": Curriculum(3).session_seed(""), "options": options},
        {"options": options},
    ]


def test_a_gateway_follows_the_steps_of_its_requests(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"*": "all"}, simulator_parameters=WIND)
    with world.connect("one") as session:
        assert session.parameters["gravity"] == 1.0
        world.begin()
        (request,) = world.requests(all=0)
        request.steps_trained = 18
        world.driver.tell(request)
        session.step({"one": see(0, 0)})
        session.step({"one": see(0, 1)}, {"one": 1.0})
        assert session.parameters["gravity"] == pytest.approx(2.6)


# A gateway logs arrivals, departures, refusals, and how a batch fills up.


def said(world: GatewayWorld, words: str) -> tuple[str, bool, int, int]:
    """What people were told with these words, once they are."""
    return world.changes.wait_for(lambda: [each for each in world.told if words in each[0]])[0]


def test_who_comes_and_leaves_is_told_with_address_environments_and_policy() -> None:
    with GatewayWorld() as world:
        with world.connect(environments=3):
            text, warning, *here = said(world, "has the simulator at 127.0.0.1:")
            assert text.endswith(": 3 environments for policy 'default'")
            assert (warning, here) == (False, [1, 3])
        text, warning, *here = said(world, "no longer has the simulator at 127.0.0.1:")
        assert text.endswith(": it said goodbye")
        assert (warning, here) == (False, [0, 0])


def test_a_connection_that_breaks_is_told_and_so_is_who_comes_back() -> None:
    with GatewayWorld(rows=1) as world, world.connect() as session:
        world.ask(10)
        break_off(session)
        text, _, *here = said(world, "lost the connection of the simulator at 127.0.0.1:")
        assert text.endswith(": waits 60 s for it")
        assert here == [0, 0]
        session.step(np.zeros(3))
        assert said(world, "has again the simulator at 127.0.0.1:")[2:] == (1, 1)


@pytest.mark.parametrize("mode", [pb.LOCAL_INFERENCE, pb.LOGGED_DATA])
def test_a_run_with_evaluations_warns_once_where_no_simulator_lets_the_gateway_act(
    mode: pb.Mode,
) -> None:
    def warnings_of(world: GatewayWorld) -> list[bool]:
        for _ in range(2):
            with RawSimulator(world.address) as simulator:
                assert simulator.greet(mode=mode).HasField("welcome")
        return [warning for text, warning, *_ in world.told if "evaluation_seconds" in text]

    with GatewayWorld(evaluates=True) as world:
        with world.connect():
            assert warnings_of(world) == []
        assert warnings_of(world) == [True]
    with GatewayWorld() as world:
        assert warnings_of(world) == []


def test_who_is_refused_is_told_as_a_warning_with_the_reason() -> None:
    with GatewayWorld(token="right") as world:
        with pytest.raises(GatewayError, match="UNAUTHENTICATED"):
            world.connect(token="wrong")
        text, warning, *here = said(world, "refused a simulator at 127.0.0.1:")
        assert "token" in text
        assert (warning, here) == (True, [0, 0])


def test_who_sends_what_cannot_be_taken_is_told_to_leave_with_the_reason() -> None:
    with GatewayWorld(rows=1) as world, world.connect() as session:
        world.ask(10)
        with pytest.raises(GatewayError):
            session.step(np.full(3, np.nan))
        text, warning, *_ = said(world, "no longer has")
        assert "NOT_FINITE: environment 0: the observation" in text
        assert warning, "`juggler evaluate` shows nothing else"


def test_of_those_who_are_refused_one_line_a_minute_is_told_with_their_number() -> None:
    lines: list[tuple[str, bool]] = []
    clock = SimpleNamespace(now=0.0)
    book = ConnectionLog(
        Sessions(60.0), lambda *told: lines.append(told[:2]), clock=lambda: clock.now
    )
    for port in range(1000):
        book.refused(f"ipv4:10.0.0.1:{port}", "no token\nat all")
        clock.now += 0.05
    assert lines == [("refused a simulator at 10.0.0.1:0: no token at all", True)]
    clock.now = 60.0
    book.report_omitted()
    book.report_omitted()
    more = "refused a simulator at 10.0.0.1:999: no token at all (999 times in the last 60 s; this "
    assert lines[1:] == [(f"{more}is the last one)", True)]
    clock.now = 61.0
    book.refused("ipv4:10.0.0.1:5", "again")
    assert len(lines) == 2, "one line a minute"
    clock.now = 300.0
    book.report_omitted()
    assert lines[2][0] == "refused a simulator at 10.0.0.1:5: again"
    clock.now = 600.0
    book.report_omitted()
    book.refused("ipv4:10.0.0.1:6", "again")
    assert lines[3:] == [("refused a simulator at 10.0.0.1:6: again", True)]


def test_simulators_that_come_and_leave_at_once_are_no_flood_for_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with GatewayWorld() as world:
        monkeypatch.setattr(world._server.manager.guests, "_clock", lambda: 0.0)
        for _ in range(20):
            world.connect().close()
        world.wait_for_count("sessions", 0)
        assert len(world.told) == 20


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:12", "10.0.0.1:12"),
        ("ipv6:%5B::1%5D:12", "[::1]:12"),
        ("unix:", "a Unix socket"),
        ("", "an unknown address"),
    ],
)
def test_addresses_are_written_as_people_write_them(peer: str, address: str) -> None:
    assert address_of(peer) == address


def heard(world: AgentsWorld, words: str) -> str:
    while words not in (text := world.notes.get(timeout=60)):
        pass
    return text


def test_agents_are_named_and_so_is_how_full_a_batch_is_that_takes_long(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"row": "rows", "column": "columns"})
    world.runner.slow_seconds = 0.2
    with world.connect("row", "column") as session:
        text = heard(world, "has the simulator at")
        assert text.endswith("1 environment for policies 'rows', 'columns', agents 'row', 'column'")
        world.begin()
        world.ask("rows", "columns")
        for step in range(3):
            session.step({"row": see(step, 0), "column": see(step, 1)}, {"row": 1.0, "column": 1.0})
        text = heard(world, "of its next batch after")
        assert text.startswith("has 2 of 4 steps of module rows, 2 of 4 steps of module columns of")
        assert text.endswith("s; environments of simulators: 1")


def test_environments_that_find_no_rows_in_a_batch_are_told(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"row": "rows", "column": "columns"})
    with world.connect("row", "column"), world.connect("row", "column"):
        assert "a batch has envs_per_runner = 1 rows" in heard(world, "2 environments, and a batch")


def test_who_says_goodbye_and_closes_its_side_has_lost_no_connection() -> None:
    with GatewayWorld() as world:
        for _ in range(5):  # both may come at once, or one after the other
            with RawSimulator(world.address) as simulator:
                simulator.greet()
                simulator.send(goodbye=pb.Goodbye())
                simulator.say_no_more()
                with pytest.raises(StopIteration):
                    simulator.hear()
        said(world, "it said goodbye")
        assert not [text for text, *_ in world.told if "lost the connection" in text]
