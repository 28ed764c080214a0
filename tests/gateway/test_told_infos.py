"""Numbers in simulators' infos reach receipts as environments' do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.gateway_world import (
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
from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1.tensors_pb2 import DType

NAMES = ["step", "success", "broken"]
LENGTHS = (3, 1, 21, 2)
NAN = float("nan")


def numbers(step: int, length: int) -> dict[str, Any]:
    """Infos of a step: successes at the ends of long episodes."""
    told: dict[str, Any] = {"step": step, "broken": NAN, "none of the names": [1, 2, 3]}
    return {**told, "success": length > 2} if step == length > 1 else told


def expected(lengths: Any) -> InfoNumbers:
    return {
        "step": [InfoNumber((1 + length) / 2, 1.0, float(length)) for length in lengths],
        "success": [InfoNumber(*[float(length > 2)] * 3) for length in lengths if length > 1],
    }


def by_name(found: InfoNumbers) -> InfoNumbers:
    """In any order: environments of a session are not told apart."""
    return {name: sorted(episodes) for name, episodes in found.items()}


def perform(session: Any, episodes: int) -> None:
    """Play episodes of known lengths, with a step for each end."""
    for k in range(episodes):
        length = LENGTHS[k % len(LENGTHS)]
        session.step(np.zeros(3), infos={"step": 1000.0})  # of no action
        for step in range(1, length + 1):
            session.step(np.ones(3), 1.0, step == length, infos=numbers(step, length))


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


@pytest.mark.parametrize("mode", ["remote", "local"])
def test_numbers_are_told_over_episodes_whoever_acts(world: GatewayWorld, mode: Any) -> None:
    world.use(0.4, Version(1, 0))
    with world.connect(mode=mode, info_names=NAMES) as session:
        perform(session, 8)
        if mode == "local":
            session.flush()
        world.wait_for_count("episodes", 8)
        assert taken(world) == expected(LENGTHS * 2)
        assert taken(world) == {}
        perform(session, 2)
    world.wait_for_count("episodes", 10)
    assert taken(world) == expected(LENGTHS[:2])


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
