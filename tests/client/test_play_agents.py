"""Messages of `play` and `play_agents`; gateways that die or hang."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from support.changes import newer_threads_end
from support.gateway_world import (
    PATIENCE,
    THREE,
    TWO_WAYS,
    GatewayWorld,
    RawSimulator,
    hello,
)
from support.network import free_address

from juggler.client import GatewayError, Session, connect, connection, play, play_agents, playing
from juggler.client.playing import _play
from juggler.client.space_values import Values
from juggler.runtime.wire.v1 import simulator_pb2 as pb

MASKS = {"a": [1, 0, 1], "b": [0, 1, 1]}


class Recorder:
    """Stands in for a session, and acts with the first legal action."""

    parameters: Mapping[str, float] = {}

    def next_seed(self) -> None:
        pass

    def __init__(self, agents: Mapping[str, tuple[Any, Any]]) -> None:
        self.values = {name: Values(playing.as_message(each[0])) for name, each in agents.items()}
        self.shown: list[tuple[str, Any]] = []
        self.infos: list[Any] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(
        self,
        shown: Mapping[str, Any],
        rewards: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        infos: Any = None,
        continues: bool = False,
    ) -> dict[str, Any]:
        self.infos.append(infos)
        self.continues = continues
        for name, each in shown.items():
            self.values[name].arrays(each, one=True)  # it fits its space
            self.shown.append((name, each))
        over = {name for name in shown if (terminated or {}).get(name)}
        return {
            name: int(np.argmax(each["action_mask"]))
            if isinstance(each, Mapping) and "action_mask" in each
            else 0
            for name, each in shown.items()
            if name not in over
        }


class AtOnce:
    """Two agents, one of which observes a Dict, for two steps."""

    possible_agents = ("a", "b")
    forgets = False

    def observation_space(self, agent: str) -> Any:
        seen = Box(-1, 1, (2,))
        return Dict({"seen": seen}) if agent == "b" else seen

    def action_space(self, agent: str) -> Any:
        return Discrete(3)

    def _shown(self) -> dict[str, Any]:
        return {"a": np.zeros(2, np.float32), "b": {"seen": np.zeros(2, np.float32)}}

    def reset(self, seed: int | None = None) -> Any:
        self.agents, self.t = list(self.possible_agents), 0
        return self._shown(), {name: {"action_mask": np.array(MASKS[name])} for name in MASKS}

    def step(self, actions: Any) -> Any:
        assert actions == {"a": 0, "b": 1}
        self.t += 1
        over = self.t == 2
        infos = {
            name: {} if over or self.forgets else {"action_mask": MASKS[name]} for name in MASKS
        }
        self.agents = [] if over else self.agents
        each = dict.fromkeys
        return self._shown(), each(MASKS, 1.0), each(MASKS, over), each(MASKS, False), infos


class InTurns(AtOnce):
    """Agents in turns; only the one on turn has a mask."""

    def reset(self, seed: int | None = None) -> None:
        super().reset()
        self.infos = {"a": {"action_mask": MASKS["a"]}, "b": {}}
        self.agent_selection = "a"

    def last(self) -> Any:
        agent, over = self.agent_selection, self.t >= 2
        info = {} if over else {"action_mask": MASKS[agent]}
        return self._shown()[agent], 0.5, over, False, info

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        assert action == (None if self.t >= 2 else {"a": 0, "b": 1}[agent])
        if action is None:
            self.agents.remove(agent)
        self.t += 1
        self.agent_selection = "b" if agent == "a" else "a"


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made: list[Recorder] = []

    def connect(address: str, agents: Any) -> Recorder:
        made.append(Recorder(agents))
        return made[-1]

    monkeypatch.setattr(playing, "connect_agents", connect)
    return made


@pytest.mark.parametrize(("env", "returned"), [(AtOnce(), 2.0), (InTurns(), 1.0)])
def test_masks_in_infos_are_parts_of_observations(
    sessions: list[Recorder], env: Any, returned: float
) -> None:
    assert play_agents(env, "nowhere", episodes=2) == [{"a": returned, "b": returned}] * 2
    (session,) = sessions
    for name, shown in session.shown:
        part = {"a": "observation", "b": "seen"}[name]
        assert shown.keys() == {part, "action_mask"}
    masks = {
        name: [list(s["action_mask"]) for n, s in session.shown if n == name] for name in MASKS
    }
    for name, found in masks.items():
        assert MASKS[name] in found
        assert [1, 1, 1] in found, "after its last step, an agent has no choice any more"


def test_infos_are_handed_on_after_each_step(sessions: list[Recorder]) -> None:
    play_agents(AtOnce(), "nowhere", episodes=1)
    play_agents(InTurns(), "nowhere", episodes=1)
    at_once, in_turns = sessions
    masks = {name: {"action_mask": mask} for name, mask in MASKS.items()}
    assert at_once.infos == [None, masks, {"a": {}, "b": {}}]
    assert in_turns.infos == [{"a": masks["a"]}, {"b": masks["b"]}, {"a": {}}, {"b": {}}]


def test_an_agent_that_acts_without_its_mask_is_named(sessions: list[Recorder]) -> None:
    env = AtOnce()
    env.forgets = True
    with pytest.raises(ValueError, match="action_mask"):
        play_agents(env, "nowhere", episodes=1)


@pytest.mark.parametrize("mask", [[1, 0, 2], [1, 1], [[1, 0, 1]], [0.5, 1, 1], [256, 0, 1], "101"])
def test_a_mask_that_is_none_is_named(sessions: list[Recorder], mask: Any) -> None:
    class Wrong(AtOnce):
        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            return *rest, {**infos, "b": {"action_mask": mask}}

    with pytest.raises(ValueError, match="action_mask of agent 'b'"):
        play_agents(Wrong(), "nowhere", episodes=1)


def test_infos_may_be_empty(sessions: list[Recorder]) -> None:
    class Plain(AtOnce):
        def reset(self, seed: int | None = None) -> Any:
            return super().reset()[0], {}

        def step(self, actions: Any) -> Any:
            return *super().step({"a": 0, "b": 1})[:4], {}

    assert play_agents(Plain(), "nowhere", episodes=1) == [{"a": 2.0, "b": 2.0}]
    (session,) = sessions
    assert all(isinstance(shown, np.ndarray) for name, shown in session.shown if name == "a")


class Numbered(AtOnce):
    """Agents are numbers, and dicts have keys of no agent."""

    possible_agents = (0, 1)  # type: ignore[assignment]

    def observation_space(self, agent: Any) -> Any:
        return Box(-1, 1, (2,))

    def reset(self, seed: int | None = None) -> Any:
        self.agents, self.t = [0, 1], 0
        return self._seen(), {0: {}, "common": {"action_mask": [1]}}

    def step(self, actions: Any) -> Any:
        assert actions == {0: 0, 1: 0}
        self.t += 1
        self.agents = [] if self.t == 2 else self.agents
        over = dict.fromkeys((*self.possible_agents, "__all__"), self.t == 2)
        return self._seen(), {0: 1.0, 1: 2.0, "common": 3.0}, over, over, {}

    def _seen(self) -> Any:
        return {agent: np.zeros(2, np.float32) for agent in self.possible_agents}


def test_agents_may_be_numbers_and_extra_keys_are_ignored(sessions: list[Recorder]) -> None:
    assert play_agents(Numbered(), "nowhere", episodes=2) == [{"0": 2.0, "1": 4.0}] * 2
    (session,) = sessions
    assert {name for name, _ in session.shown} == {"0", "1"}


def test_an_episode_continues_while_agents_are_left(sessions: list[Recorder]) -> None:
    class Relay(AtOnce):
        def step(self, actions: Any) -> Any:
            assert not self.t or sessions[0].continues
            self.t += 1
            self.agents = ["b"] if self.t == 1 else []
            seen = {"a": self._shown()["a"], "b": self._shown()["b"]}
            ends = {"a": True, "b": self.t == 2}
            infos = {"b": {"action_mask": MASKS["b"]}}
            return seen, dict.fromkeys(actions, 1.0), ends, dict.fromkeys(ends, False), infos

    play_agents(Relay(), "nowhere", episodes=1)
    assert not sessions[0].continues


# Environments that `juggler.client.play` plays against gateways that die.


class Deadly(gymnasium.Env[Any, Any]):
    """Episodes of four steps; something happens in the sixth step of all."""

    observation_space, action_space = THREE, TWO_WAYS

    def __init__(self, happen: Any) -> None:
        self.episodes = self.steps = 0
        self._happen = happen

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.episodes += 1
        self._left = 4
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self._left -= 1
        if self.steps == 6:
            self._happen()
        return np.ones(3, np.float32), 1.0, self._left == 0, False, {}


def serve(address: str) -> None:
    with GatewayWorld(rows=1, address=address) as world:
        world.ask(1000)
        threading.Event().wait()


@pytest.mark.slow
@pytest.mark.usefixtures("local_workers")
def test_play_goes_on_with_the_gateway_that_takes_the_place_of_a_dead_one() -> None:
    address = free_address()
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=serve, args=(address,))
    first.start()
    with ExitStack() as stack:

        def replace() -> None:
            first.kill()
            first.join()
            stack.enter_context(GatewayWorld(rows=1, address=address)).ask(1000)

        env = Deadly(replace)
        try:
            assert play(env, address, episodes=3) == [4, 4, 4]
        finally:
            first.kill()
            first.join()
    assert env.episodes == 4, "the episode that ran when the gateway died began again"
    assert env.steps == 3 * 4 + 2


def test_play_ends_with_the_run_and_tells_of_anything_else() -> None:
    with GatewayWorld(rows=1) as world:
        world.ask(1000)
        assert play(Deadly(world.close), world.address) == [4]
    refused = pytest.raises(GatewayError, match="UNAUTHENTICATED")
    with GatewayWorld(rows=1, token="a secret") as world, refused:
        play(Deadly(print), world.address, timeout=PATIENCE)


class OneArray(gymnasium.Env[Any, Any]):
    """Writes each observation into the same array; every step is truncated."""

    def __init__(self) -> None:
        self.seen = np.zeros(1)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.seen += 1
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], 0.0, False, True, {}


def test_the_last_observation_of_an_episode_is_not_that_of_the_next_one() -> None:
    finals: list[float] = []

    class Heard:
        parameters: Mapping[str, float] = {}

        def step(self, observation: Any, *told: Any, **_: Any) -> int:
            if len(told) == 4:
                finals.append(float(told[3][0]))
            return 0

    _play(OneArray(), Heard(), 3, 0, [])  # type: ignore[arg-type]
    assert finals == [2.0, 4.0]


# A client whose gateway does not answer, or not as it wishes.


def test_a_missing_welcome_is_an_error_in_time() -> None:
    with GatewayWorld() as world, world._server.at_work():
        with pytest.raises(GatewayError, match="DEADLINE_EXCEEDED") as told:
            connect(world.address, THREE, TWO_WAYS, timeout=0.2)
        assert told.value.retryable


def test_a_goodbye_without_an_answer_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GOODBYE_SECONDS", 0.1)
    with GatewayWorld(rows=1) as world:
        world.ask()
        session = world.connect()
        session.step(np.zeros(3))
        with world._server.at_work():
            session.close()


def test_a_step_that_is_interrupted_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with GatewayWorld(rows=1) as world:
        world.ask()
        with world.connect() as session:
            session.step(np.zeros(3))
            with monkeypatch.context() as patch:
                patch.setattr(Session, "_next", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    session.step(np.zeros(3), 1.0)
            assert session._unanswered == {}


def test_a_refused_session_leaves_no_thread_behind() -> None:
    with GatewayWorld(refuses_logged="not here") as world:
        before = {*threading.enumerate()}
        for _ in range(5):
            with pytest.raises(GatewayError, match="not here"):
                world.connect(mode="logged")
        newer_threads_end(before)


def test_a_session_that_cannot_begin_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    with GatewayWorld() as world:
        monkeypatch.setattr(Session, "pull", _fails)
        with pytest.raises(RuntimeError, match="no model"):
            world.connect(mode="local")
        world.wait_for_count("sessions_begun", 1)
        world.wait_for_count("sessions", 0)


def _fails(_: object) -> None:
    raise RuntimeError("no model")


def test_a_call_of_any_bytes_is_one_of_no_method() -> None:
    with GatewayWorld(token="a secret") as world:
        assert b"grpc-status" in _answer_to(world.address, b"/juggler.\xff\xfe/X")
        assert world.failure is None
        with RawSimulator(world.address, "a secret") as simulator:
            simulator.send(hello=hello())
            assert isinstance(simulator.hear(), pb.ToSimulator)


def _answer_to(address: str, path: bytes) -> bytes:
    """Return the answer to a call that gRPC's clients do not make."""
    host, port = address.split(":")
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"here",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    literal = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in headers.items()
    )
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        raw.sendall(_frame(1, 4, 1, literal))
        heard = b""
        while b"grpc-status" not in heard and (more := raw.recv(4096)):
            heard += more
        return heard


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload).to_bytes(3, "big")
    return size + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
