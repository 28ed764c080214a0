"""Faults of simulators: they vanish, come back, are slow, or cannot wait."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import numpy as np
import pytest
from gymnasium import spaces
from support.gateway_world import (
    THREE,
    TWO_WAYS,
    GatewayWorld,
    RawSimulator,
    break_off,
    hello,
    steps_of,
)

from juggler.client import GatewayError
from juggler.gateway import transport
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.transport import Transport
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb

MASKED = spaces.Dict({"observation": THREE, "action_mask": spaces.MultiBinary(2)})


@pytest.fixture(scope="module")
def world() -> Any:
    with GatewayWorld(rows=4, steps=4) as world:
        world.ask(1000)
        with RawSimulator(world.address) as first:
            first.greet()
        yield world


def refused(answer: pb.ToSimulator) -> tuple[str, str]:
    assert answer.WhichOneof("message") == "error", answer
    return pb.Error.Code.Name(answer.error.code), answer.error.message


def spaces_of(observations: Any, actions: Any = TWO_WAYS) -> list[pb.Agent]:
    return list(hello(observations, actions).agents)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"protocol_min": 2, "protocol_max": 3}, "UNSUPPORTED_VERSION", "speaks version 1 to 1"),
        ({"protocol_max": 0, "protocol_min": 0}, "UNSUPPORTED_VERSION", "set both"),
        ({"mode": 99}, "NOT_SERVED", "use REMOTE_INFERENCE"),
        ({"agents": spaces_of(THREE) * 2}, "NOT_SERVED", "one agent"),
        ({"environments": 0}, "UNKNOWN_ENVIRONMENT", "at least 1"),
        ({"environments": 1 << 20}, "FULL", "1048576 environments in one session"),
        ({"agents": spaces_of(spaces.Discrete(3))}, "WRONG_SPACES", "must have the same"),
        (
            {"agents": spaces_of(THREE, spaces.Discrete(3))},
            "WRONG_SPACES",
            "this action_space is Discrete(3); that of the run's first simulator is Discrete(2)",
        ),
        ({"agents": [pb.Agent()]}, "WRONG_SPACES", "observation_space"),
        ({"resume_token": "no such"}, "UNKNOWN_SESSION", "Begin a new one"),
        (
            {"environments": 1 << 16, "info_names": ["x", "y", "z", "height", "speed"]},
            "FULL",
            "at most 262144 may be: name fewer",
        ),
        ({"info_names": list(map(str, range(33)))}, "NOT_SERVED", "33 info_names: have at most 32"),
        ({"info_names": ["x", "y", "x"]}, "NOT_SERVED", "'x' among info_names"),
        ({"info_names": [""]}, "NOT_SERVED", "of 1 to 100 printable characters"),
        ({"info_names": ["a" * 101]}, "NOT_SERVED", "of 1 to 100 printable characters"),
        ({"info_names": ["a\n"]}, "NOT_SERVED", "of 1 to 100 printable characters"),
    ],
)
def test_a_hello_that_does_not_fit_is_answered_with_what_to_do(
    world: GatewayWorld, changes: dict[str, Any], code: str, said: str
) -> None:
    with RawSimulator(world.address) as simulator:
        given, text = refused(simulator.greet(**changes))
        assert given == code
        assert said in text
        with pytest.raises(StopIteration):
            simulator.hear()


def test_a_session_that_never_finds_room_need_not_try_again(world: GatewayWorld) -> None:
    with RawSimulator(world.address) as simulator:
        assert not simulator.greet(environments=1 << 20).error.retryable


def test_nothing_is_taken_from_a_stream_whose_hello_was_refused() -> None:
    with GatewayWorld() as world:
        for _ in range(40):
            with RawSimulator(world.address) as simulator:
                for environments in (0, 1, 1):
                    simulator.send(hello=hello(environments=environments))
                assert refused(simulator.hear())[0] == "UNKNOWN_ENVIRONMENT"
        assert world.count("sessions_begun") == 0


NAN = ((float("nan"), 0, 0),)


def bad_tensor(**changes: Any) -> pb.StepBatch:
    batch = steps_of(2)
    tensor = batch.agents[0].observations[0]
    for name, value in changes.items():
        if name in ("shape", "path"):
            del getattr(tensor, name)[:]
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return batch


def without_observation() -> pb.StepBatch:
    batch = steps_of(2)
    del batch.agents[0].observations[:]
    return batch


FINAL = {"final_rows": [0], "final_observations": steps_of(1, NAN).agents[0].observations}


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        ({"steps": steps_of(2, NAN)}, "NOT_FINITE", "environment 0: the observation is NaN"),
        ({"steps": steps_of(2, rewards=[float("inf")])}, "NOT_FINITE", "reward of environment 0"),
        ({"steps": bad_tensor(shape=[1, 4])}, "WRONG_SHAPE", "send DTYPE_FLOAT32 and shape"),
        ({"steps": bad_tensor(dtype=12)}, "WRONG_SHAPE", "root: DTYPE_FLOAT64"),
        ({"steps": bad_tensor(dtype=99)}, "WRONG_SHAPE", "root: dtype 99 and shape"),
        ({"steps": bad_tensor(data=b"1234")}, "WRONG_SHAPE", "4 bytes"),
        ({"steps": bad_tensor(path=["x"])}, "WRONG_SHAPE", "at 'x': send one for each of the root"),
        ({"steps": without_observation()}, "WRONG_SHAPE", "0 arrays of observations"),
        ({"steps": steps_of(2, rewards=[1, 2])}, "WRONG_SHAPE", "2 rewards for 1 rows"),
        ({"steps": steps_of(2, terminated=[True, True])}, "WRONG_SHAPE", "2 terminated"),
        ({"steps": steps_of(2, infos=[1, 2])}, "WRONG_SHAPE", "2 infos for 1 rows, and the hello"),
        ({"steps": steps_of(2, infos=[1] * 6)}, "WRONG_SHAPE", "has 3 info_names: send one"),
        ({"steps": steps_of(2, environments=[1])}, "UNKNOWN_ENVIRONMENT", "from 0 to 0"),
        ({"steps": steps_of(2, agent=1)}, "UNKNOWN_AGENT", "rows of agent 1: this session has"),
        ({"steps": pb.StepBatch(seq=2)}, "UNKNOWN_AGENT", "agent 0 alone"),
        ({"steps": steps_of(7)}, "OUT_OF_ORDER", "seq 7, but 2 comes next"),
        ({"steps": steps_of(1, rewards=[2])}, "OUT_OF_ORDER", "another one came as 1 before"),
        ({"steps": steps_of(2, truncated=[True])}, "NO_FINAL_OBSERVATION", "row 0 was truncated"),
        ({"steps": steps_of(2, truncated=[True], **FINAL)}, "NOT_FINITE", "environment 0"),
        ({"steps": steps_of(2, paused=[True])}, "OUT_OF_ORDER", "no episode ended"),
        ({"hello": hello()}, "SECOND_HELLO", "open another stream"),
        ({"recording": pb.Recording()}, "WRONG_MODE", "this session is REMOTE_INFERENCE"),
        ({}, "BAD_MESSAGE", "nothing in it"),
    ],
)
def test_a_wrong_message_ends_the_session_and_its_episode_as_truncated(
    world: GatewayWorld, message: dict[str, Any], code: str, said: str
) -> None:
    cut = world.count("episodes_cut")
    with RawSimulator(world.address) as simulator:
        assert simulator.greet(info_names=["a", "b", "c"]).HasField("welcome")
        assert simulator.step(steps_of(1)).actions.seq == 1
        if message.get("steps") is not None and message["steps"].seq == 2:
            message = {"steps": pb.StepBatch.FromString(message["steps"].SerializeToString())}
            message["steps"].seq = 3
            assert simulator.step(steps_of(2)).actions.seq == 2
        simulator.send(**message)
        given, text = refused(simulator.hear())
        assert given == code
        assert said in text
    if message and "steps" in message and message["steps"].seq == 3:
        assert world.count("episodes_cut") == cut + 1
    assert world.failure is None


def test_bytes_that_are_no_message_are_told_so(world: GatewayWorld) -> None:
    with RawSimulator(world.address) as simulator:
        simulator.send_bytes(b"\xff" * 9)
        assert refused(simulator.hear())[0] == "BAD_MESSAGE"
    with RawSimulator(world.address) as simulator:
        simulator.send(steps=steps_of(1))
        assert refused(simulator.hear())[0] == "EXPECTED_HELLO"


def test_an_episode_cannot_end_before_its_first_action(world: GatewayWorld) -> None:
    with RawSimulator(world.address) as simulator:
        simulator.greet()
        assert refused(simulator.step(steps_of(1, terminated=[True])))[0] == "OUT_OF_ORDER"


def test_an_environment_waits_for_its_action_before_it_goes_on() -> None:
    with GatewayWorld(rows=1) as world, RawSimulator(world.address) as simulator:
        simulator.greet()
        simulator.send(steps=steps_of(1))
        code, text = refused(simulator.step(steps_of(2)))
        assert code == "OUT_OF_ORDER"
        assert "environment 0 has not had its last action yet" in text


def test_too_many_batches_in_flight_are_refused() -> None:
    with GatewayWorld(rows=1) as world, RawSimulator(world.address) as simulator:
        most = simulator.greet(environments=20).welcome.batches_in_flight
        for seq in range(1, most + 1):
            simulator.send(steps=steps_of(seq, environments=[seq]))
        code, _ = refused(simulator.step(steps_of(most + 1, environments=[0])))
        assert code == "TOO_MANY_IN_FLIGHT"


def test_masked_actions_are_never_chosen_and_a_mask_needs_one_that_is_not() -> None:
    with GatewayWorld(Masked, rows=1, steps=4) as world:
        world.ask(1000)
        masks = np.array([[1, 0], [0, 1]] * 8, np.int8)
        with world.connect(MASKED, environments=16) as session:
            for _ in range(10):
                shown = {"observation": np.zeros((16, 3), np.float32), "action_mask": masks}
                assert session.step(shown).tolist() == masks[:, 1].tolist()
                masks = 1 - masks
            shown["action_mask"] = np.zeros((16, 2), np.int8)
            with pytest.raises(GatewayError, match="NO_LEGAL_ACTION"):
                session.step(shown)
        with world.connect(MASKED) as one:
            bad = {"observation": np.zeros(3, np.float32), "action_mask": np.array([2, 1], np.int8)}
            with pytest.raises(GatewayError, match="NO_LEGAL_ACTION"):
                one.step(bad)


def test_a_masked_environment_may_pause_and_end_where_nothing_is_allowed() -> None:
    shown = {"observation": np.zeros(3, np.float32), "action_mask": np.array([0, 1], np.int8)}
    over = {"observation": np.ones(3, np.float32), "action_mask": np.zeros(2, np.int8)}
    with GatewayWorld(Masked, rows=1, steps=4) as world:
        world.ask(10)
        with world.connect(MASKED) as session:
            for _ in range(4):
                assert session.step(shown) == 1
                assert session.step(over, 1.0, False, True) is None
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.final_observations["observation"].tolist() == [[1, 1, 1]] * 4


def test_who_does_not_read_answers_is_let_go_of_before_they_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MOST_UNREAD", 1 << 20)
    with GatewayWorld(rows=1) as world:
        world.ask(1 << 20)
        with RawSimulator(world.address) as simulator:
            simulator.greet(environments=8000)
            batch = pb.FromSimulator(steps=steps_of(1, np.zeros((8000, 3)))).SerializeToString()
            simulator.send_bytes(batch)
            assert simulator.hear().ByteSize() > 64000
            for _ in range(1000):
                simulator.send_bytes(batch)
            (session,) = world._server.manager.sessions.by_id.values()
            world.changes.wait_for(lambda: session.stream is None)
            with pytest.raises(grpc.RpcError) as ended:
                all(iter(simulator.hear, None))
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "were not read: read them" in ended.value.details()
        assert world.count("sessions") == 1, "it may come back"


def test_who_reads_no_policy_is_let_go_of_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_UNREAD", 1 << 20)
    with GatewayWorld(rows=1) as world:
        world.use(1.0, Version(1, 0))
        assert world.player is not None
        monkeypatch.setattr(world._server._local, "_publisher", LargePolicy())
        with RawSimulator(world.address) as simulator:
            simulator.greet(mode=pb.LOCAL_INFERENCE)
            simulator.send(policy=pb.PolicyRequest())
            with pytest.raises(grpc.RpcError) as ended:
                all(iter(simulator.hear, None))
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        world.ask()
        with world.connect() as session:
            assert session.step(np.zeros(3)) in (0, 1)


class LargePolicy:
    """Stands for a `Publisher` of what no stream takes at once."""

    ready, failure = True, ""

    def begin(self, done: object) -> None:
        pass

    def chunks(self, version: Version) -> list[pb.ToSimulator]:
        return [pb.ToSimulator(policy=pb.PolicyChunk(data=bytes(1 << 19)))] * 8


def test_an_address_that_is_taken_is_told_and_leaves_nothing_behind() -> None:
    with GatewayWorld() as world:
        server = GatewayServer(
            Transport(""), world, GatewaySettings(1, 0.0, "", 1), lambda error: None
        )
        with pytest.raises(EndpointError, match="listen"):
            server.start(world.address, None, False)
        server.close("it did not start")


def test_what_is_said_right_before_a_goodbye_is_learned_from() -> None:
    with GatewayWorld(rows=1, steps=8) as world:
        world.ask()
        with RawSimulator(world.address) as simulator:
            simulator.greet()
            simulator.step(steps_of(1))
            simulator.send(steps=steps_of(2, rewards=[5], terminated=[True], paused=[True]))
            simulator.send(goodbye=pb.Goodbye())
            world.wait_for(1)
            world.wait_for_count("environments", 0)
        batch, ended = world.batches[0]
        assert batch.live_steps == 1
        assert batch.terminated[0, 0]
        assert ended == [(5.0, 1)]


class Masked:
    """Makes the module that knows of masks."""

    def __new__(cls, observation_space: Any, action_space: Any) -> Any:
        from juggler.runtime.modules.config import ModuleConfig
        from juggler.runtime.modules.module_specs import build_module

        return build_module(ModuleConfig().module, observation_space, action_space, {})


def test_observations_outside_a_counted_space_do_not_reach_the_policy() -> None:
    counted = spaces.Dict({"observation": THREE, "place": spaces.Discrete(4, start=1)})
    with GatewayWorld(Masked, rows=1) as world:
        world.ask()
        with world.connect(counted) as session:
            assert session.step({"observation": np.zeros(3), "place": np.int64(4)}) in (0, 1)
            with pytest.raises(GatewayError, match=r"WRONG_SHAPE.*'place'"):
                session.step({"observation": np.zeros(3), "place": np.int64(5)})


def test_a_space_that_nobody_can_learn_in_leaves_the_gateway_waiting_for_another() -> None:
    three_masks = spaces.Dict({"observation": THREE, "action_mask": spaces.MultiBinary(3)})
    with GatewayWorld(rows=1) as world:
        for observations, actions, said in (
            (spaces.Text(3), TWO_WAYS, "give their characters as numbers"),
            (THREE, spaces.Text(3), "give their characters as numbers"),
            (THREE, spaces.Dict({}), "has nothing in it"),
            (three_masks, TWO_WAYS, "has shape [3], not [2]"),
            (spaces.Discrete(10**13), TWO_WAYS, "an observation is 10000000000000 numbers"),
            (THREE, spaces.MultiDiscrete([2**62] * 4), "an action is 18446744073709551616 numbers"),
        ):
            with RawSimulator(world.address) as simulator:
                agents = spaces_of(observations, actions)
                code, text = refused(simulator.greet(agents=agents))
                assert code == "WRONG_SPACES"
                assert said in text
        world.ask()
        with world.connect() as session:
            assert session.step(np.zeros(3)) in (0, 1)
        world.wait_for_count("sessions", 0)


# Simulators that vanish, come back, dawdle or cannot wait.


def test_who_comes_back_gets_the_same_answer_to_the_same_seq() -> None:
    with GatewayWorld(rows=1, steps=100) as world:
        world.ask()
        with RawSimulator(world.address) as simulator:
            welcome = simulator.greet().welcome
            answers = [simulator.step(steps_of(seq)) for seq in (1, 2, 3)]
        with RawSimulator(world.address) as simulator:
            again = simulator.greet(resume_token=welcome.resume_token).welcome
            assert again.resumed
            assert (again.session_id, again.last_seq) == (welcome.session_id, 3)
            assert simulator.step(steps_of(3)) == answers[2]
            assert simulator.step(steps_of(2)) == answers[1]
            assert simulator.step(steps_of(4)).actions.seq == 4
        assert world.count("steps") == 3  # none of them was counted twice
        assert world.count("episodes_cut") == 0


class SmallPolicy:
    """Stands for a `Publisher` whose policy is one byte."""

    ready, failure = True, ""

    def begin(self, done: object) -> None:
        pass

    def chunks(self, version: Version) -> list[pb.ToSimulator]:
        return [pb.ToSimulator(policy=pb.PolicyChunk(size=1, data=b"x"))]


def test_weights_that_came_while_a_stream_was_broken_are_announced_on_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_gone() -> bool:
        (session,) = world._server.manager.sessions.by_id.values()
        return session.stream is None

    with GatewayWorld() as world:
        world.use(1.0, Version(1, 1))
        monkeypatch.setattr(world._server._local, "_publisher", SmallPolicy())
        local: dict[str, Any] = {"mode": pb.LOCAL_INFERENCE}
        world.wait_for_count("sessions", 0)
        with RawSimulator(world.address) as simulator:
            local["resume_token"] = simulator.greet(**local).welcome.resume_token
            simulator.send(policy=pb.PolicyRequest())
            assert simulator.hear().policy.data == b"x"
        world.changes.wait_for(is_gone)
        world.use(2.0, Version(1, 2))
        for _ in range(2):  # the first announcement may have been lost with its stream
            with RawSimulator(world.address) as simulator:
                assert simulator.greet(**local).welcome.resumed
                assert simulator.hear().new_policy.version.update == 2
            world.changes.wait_for(is_gone)
        with RawSimulator(world.address) as simulator:
            simulator.greet(**local)
            assert simulator.hear().new_policy.version.update == 2
            simulator.send(policy=pb.PolicyRequest())
            assert simulator.hear().policy.data == b"x"
        world.changes.wait_for(is_gone)
        with RawSimulator(world.address) as simulator:
            simulator.greet(**local)
            world.use(3.0, Version(1, 3))
            assert simulator.hear().new_policy.version.update == 3


def test_the_client_goes_on_over_another_connection_by_itself() -> None:
    with GatewayWorld(rows=1, steps=10) as world:
        world.ask(2)
        with world.connect() as session:
            for reward in range(10):
                session.step(np.full(3, reward), reward)
                if reward == 3:
                    break_off(session)
                if reward == 6:  # as a proxy does that lets no call take longer
                    with world._server.at_work():
                        (here,) = world._server.manager.sessions.by_id.values()
                        assert here.stream is not None
                        code = transport.cygrpc.StatusCode.deadline_exceeded
                        here.stream.cut(code, "stream timeout")
            session.step(np.zeros(3), 10)
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.rewards[0].tolist() == list(range(1, 11))
        assert world.count("sessions_resumed") == 2
        assert world.count("sessions_begun") == 1


def test_a_second_stream_takes_a_session_over_and_the_first_is_told() -> None:
    with GatewayWorld(rows=1, steps=100) as world:
        world.ask()
        with RawSimulator(world.address) as old, RawSimulator(world.address) as new:
            token = old.greet().welcome.resume_token
            old.step(steps_of(1))
            assert new.greet(resume_token=token).welcome.last_seq == 1
            assert old.hear().error.code == pb.Error.SUPERSEDED
            assert new.step(steps_of(2)).actions.seq == 2


def test_steps_wait_until_somebody_asks_and_simulators_are_told_so() -> None:
    with GatewayWorld(rows=1, steps=4) as world, RawSimulator(world.address) as simulator:
        simulator.greet()
        simulator.send(steps=steps_of(1))
        assert simulator.hear_anything().notice.kind == pb.Notice.WAITING
        world.ask()
        assert simulator.hear().actions.seq == 1


def test_who_cannot_wait_acts_all_the_same_and_is_not_learned_from_meanwhile() -> None:
    with GatewayWorld(rows=1, steps=2) as world, world.connect(real_time=True) as session:
        for reward in range(6):
            assert session.step(np.ones(3), reward) in (0, 1)
        assert world.count("steps_uncollected") == 5
        world.ask()
        for reward in range(6, 9):
            session.step(np.ones(3), reward)
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.rewards.tolist() in ([[6, 7]], [[7, 8]])
        assert batch.segment_offsets.tolist() in ([5], [6])


def test_steps_of_several_sessions_are_inferred_together() -> None:
    with GatewayWorld(rows=8, steps=100, max_wait=20.0) as world:
        world.ask()
        sessions: list[Any] = [world.connect() for _ in range(8)]

        def play(session: Any) -> None:
            for _ in range(5):
                session.step(np.ones(3))
            session.close()

        threads = [threading.Thread(target=play, args=(each,)) for each in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert world.count("inferred_rows") == 40
        assert world.count("inferences") <= 10


def test_the_end_of_the_gateway_is_an_error_of_its_own() -> None:
    world = GatewayWorld(rows=1, steps=4)
    session = world.connect()
    world.ask()
    session.step(np.zeros(3))
    thread = threading.Thread(target=world.close)
    thread.start()

    def go_on() -> None:
        while True:
            session.step(np.zeros(3))

    with pytest.raises(GatewayError, match="ENDED") as ended:
        go_on()
    assert ended.value.retryable
    thread.join()


@pytest.mark.parametrize("row_age", [1, 5])
def test_a_row_is_handed_in_when_it_is_as_old_as_the_run_allows(row_age: int) -> None:
    with GatewayWorld(rows=1, steps=10, row_age=row_age) as world:
        world.use(1.0, Version(1, 0))
        world.ask(2)
        with world.connect() as session:
            for reward in range(4):
                session.step(np.full(3, reward), reward)
            world.use(1.0, Version(1, row_age))
            session.step(np.full(3, 4), 4)
            assert world.count("rows_cut") == 0
            world.use(1.0, Version(1, row_age + 1))
            world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.live_steps == 4


def test_a_space_that_is_none_is_named() -> None:
    with GatewayWorld() as world, RawSimulator(world.address) as simulator:
        (agent,) = hello(actions=TWO_WAYS).agents
        agent.ClearField("action_space")
        assert simulator.greet(agents=[agent]).error.message.startswith("action_space: a space has")
