"""Hundreds of simulators that vanish, beside ones that stay."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
from support.changes import newer_threads_end
from support.gateway_world import (
    THREE,
    TWO_WAYS,
    GatewayWorld,
    RawSimulator,
    hello,
    steps_of,
)

from juggler.gateway import gateway_server, session_manager
from juggler.gateway.session_errors import SessionError
from juggler.gateway.sessions import AgentInterface, GatewaySession, SessionAgent
from juggler.gateway.step_batches import read_steps
from juggler.runtime.wire.v1 import simulator_pb2 as pb

SESSION = "/juggler.simulator.v1.Simulator/Session"


def test_hundreds_of_connections_that_break_leave_nothing_behind() -> None:
    """Each one vanishes within an episode, with a waiting step."""
    with GatewayWorld(rows=1, resume_seconds=0.1) as world:
        threads = {*threading.enumerate()}
        for _ in range(6):
            with grpc.insecure_channel(world.address) as channel:
                talk = channel.stream_stream(
                    SESSION,
                    request_serializer=pb.FromSimulator.SerializeToString,
                    response_deserializer=pb.ToSimulator.FromString,
                )
                goes_on = threading.Event()
                calls = [talk(_two_messages(goes_on)) for _ in range(50)]
                assert all(next(call).HasField("welcome") for call in calls)
                goes_on.set()
        world.wait_for_count("sessions_lost", 300)
        newer_threads_end(threads)
        counts = world.info().counts
        assert counts["sessions_begun"] == 300
        assert (counts["sessions"], counts["environments"], counts["steps_waiting"]) == (0, 0, 0)
        world.ask()
        with world.connect() as session:
            assert session.step(np.zeros(3)) in (0, 1)


def _two_messages(goes_on: threading.Event) -> Any:
    yield pb.FromSimulator(hello=hello())
    yield pb.FromSimulator(steps=steps_of(1))
    goes_on.wait(60)


def test_those_that_vanished_make_room_for_others_and_those_that_are_here_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulator of many environments that crashes and restarts repeatedly."""
    monkeypatch.setattr(session_manager, "MOST_ENVIRONMENTS", 5)
    with GatewayWorld(rows=1) as world:
        stays = world.connect(environments=2)
        for lost in range(4):
            with RawSimulator(world.address) as simulator:
                assert simulator.greet(environments=2).welcome.session_id
                assert world.count("sessions_lost") == max(0, lost)
            world.changes.wait_for(lambda: len(world._server.manager.sessions.vanished()) == 1)
        with world.connect(environments=3) as largest, RawSimulator(world.address) as one_more:
            assert one_more.greet(environments=1).error.code == pb.Error.FULL
            assert world.count("environments") == 5
            world.ask()
            assert largest.step(np.zeros((3, 3))) is not None
        assert world.count("sessions_failed") == 0
        stays.close()


def test_numbers_of_infos_take_room_in_a_gateway_of_all_its_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_manager, "MOST_NUMBERS", 6)
    with GatewayWorld(rows=1) as world:
        vanished = world._server.manager.sessions.vanished
        stays = world.connect(environments=2, info_names=["x", "y"])
        for lost in range(3):
            with RawSimulator(world.address) as simulator:
                assert simulator.greet(info_names=["x", "y"]).welcome.session_id
                assert world.count("sessions_lost") == lost
            world.changes.wait_for(lambda: len(vanished()) == 1)
        with RawSimulator(world.address) as simulator:
            error = simulator.greet(info_names=["x", "y", "z"]).error
            assert error.code == pb.Error.FULL
            assert "3 numbers for each step" in error.message
            assert "4 of other sessions are here, and at most 6 may be" in error.message
        with RawSimulator(world.address) as simulator:
            assert simulator.greet(environments=50).welcome.session_id, "it tells none"
        stays.close()
        world.wait_for_count("sessions", 2)
        with RawSimulator(world.address) as simulator:
            assert simulator.greet(environments=2, info_names=["x", "y", "z"]).welcome.session_id


def test_steps_of_a_session_that_made_room_are_not_taken_for_those_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_manager, "MOST_ENVIRONMENTS", 3)
    with (
        GatewayWorld(rows=8, max_wait=60.0) as world,
        RawSimulator(world.address) as stays,
        RawSimulator(world.address) as stays_too,
        RawSimulator(world.address) as comes,
    ):
        world.ask()
        stays.greet()
        stays_too.greet()
        with RawSimulator(world.address) as goes:
            goes.greet()
            goes.send(steps=steps_of(1))
            # They wait for those of the others.
            world.changes.wait_for(lambda: world._server._arrivals)
        world.changes.wait_for(lambda: len(world._server.manager.sessions.vanished()) == 1)
        comes.greet()
        for simulator in (stays, stays_too, comes):
            simulator.send(steps=steps_of(1))
        assert [each.hear().actions.seq for each in (stays, stays_too, comes)] == [1, 1, 1]
        counts = world.info().counts
        assert (counts["inferred_rows"], counts["steps_waiting"]) == (3, 0)


def test_those_that_vanished_are_not_waited_for() -> None:
    # Were they waited for, the step would take longer than a test may.
    with GatewayWorld(rows=8, max_wait=3600.0) as world, world.connect() as session:
        world.ask()
        with RawSimulator(world.address) as simulator:
            simulator.greet()
        world.changes.wait_for(lambda: len(world._server.manager.sessions.vanished()) == 1)
        assert session.step(np.zeros(3)) in (0, 1)


@pytest.mark.parametrize(
    "claim",
    [
        lambda rows, most: rows.environments.extend([0] * most),
        lambda rows, most: rows.rewards.extend([0.5] * most),
        lambda rows, most: rows.final_rows.extend([0] * most),
    ],
    ids=["environments", "rewards", "final_rows"],
)
def test_rows_that_are_too_many_are_refused_before_they_are_copied(
    claim: Callable[[Any, int], None],
) -> None:
    agent = SessionAgent(0, "", {"default": [0]}, AgentInterface(THREE, TWO_WAYS))
    agent.acted[0] = 1
    batch = steps_of(1, truncated=[True])
    claim(batch.agents[0], 1_000_000)
    session = GatewaySession([agent], hello(), Nobody())
    tracemalloc.start()
    try:
        with pytest.raises(SessionError):
            read_steps(session, batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


class Nobody:
    """A connection that goes nowhere."""

    def send(self, message: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def test_streams_that_say_nothing_are_few_and_the_oldest_ends_for_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_server, "_MOST_SILENT", 2)
    with GatewayWorld() as world, ExitStack() as streams:

        def silent(count: int) -> RawSimulator:
            simulator = streams.enter_context(RawSimulator(world.address))
            world.changes.wait_for(lambda: len(world._server._silent) == count)
            return simulator

        first, second = silent(1), silent(2)
        third = streams.enter_context(RawSimulator(world.address))
        assert first.hear().error.code == pb.Error.EXPECTED_HELLO
        assert second.greet().welcome.session_id
        assert third.greet().welcome.session_id
        silent(1)
    assert not world._server._silent


def test_a_space_that_is_none_is_named() -> None:
    with GatewayWorld() as world, RawSimulator(world.address) as simulator:
        (agent,) = hello(actions=TWO_WAYS).agents
        agent.ClearField("action_space")
        assert simulator.greet(agents=[agent]).error.message.startswith("action_space: a space has")
