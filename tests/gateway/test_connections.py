"""Addresses and admissions of gateways, and connections that hang or vanish."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.changes import SkippedTime, newer_threads_end
from support.gateway_world import (
    SPACES,
    THREE,
    TWO_WAYS,
    AgentsWorld,
    GatewayWorld,
    RawSimulator,
    TinyPolicy,
    hello,
    steps_of,
)
from support.network import Network, free_address

from juggler.client import GatewayError, connect, connect_agents, connection
from juggler.envrunner.config import EnvRunnerConfig
from juggler.gateway import gateway_server, session_manager, transport
from juggler.gateway.gateway_worker import policy_in
from juggler.gateway.session_errors import SessionError
from juggler.gateway.sessions import AgentInterface, GatewaySession, SessionAgent
from juggler.gateway.step_batches import read_steps
from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox, WorkerLeft
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.wire.v1 import simulator_pb2 as pb

TOKEN = "a secret"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def address(ours: Path) -> Iterator[str]:
    with GatewayWorld(rows=1, token=TOKEN, tls=read_tls(str(ours))) as world:
        world.ask(100)
        yield world.address


def certificates(directory: Path) -> Path:
    make_certificates(directory, (), 1.0)
    return directory


@pytest.fixture
def few_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "time", SkippedTime())
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 20.0)


def dial(address: str, **options: Any) -> Any:
    return connect(address, THREE, TWO_WAYS, timeout=60.0, **options)


@pytest.mark.usefixtures("few_pauses")
def test_certificate_and_token_of_the_run_get_in(address: str, ours: Path) -> None:
    with dial(address, tls=str(ours), token=TOKEN) as session:
        assert session.step(np.zeros(3)) in (0, 1)


@pytest.mark.usefixtures("few_pauses")
@pytest.mark.parametrize("token", ["", "a guess"])
def test_another_token_or_none_is_refused_although_the_certificate_is_right(
    address: str, ours: Path, token: str
) -> None:
    with pytest.raises(GatewayError, match="UNAUTHENTICATED"):
        dial(address, tls=str(ours), token=token)


@pytest.mark.usefixtures("few_pauses")
def test_a_gateway_of_another_authority_is_not_believed(address: str, others: Path) -> None:
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        dial(address, tls=str(others), token=TOKEN)


@pytest.mark.usefixtures("few_pauses")
def test_a_certificate_of_another_authority_does_not_get_in(
    address: str, ours: Path, others: Path, tmp_path: Path
) -> None:
    """Although it knows whom to believe, and the token."""
    for name, source in (("ca", ours), ("cert", others), ("key", others)):
        shutil.copy(source / f"{name}.pem", tmp_path)
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        dial(address, tls=str(tmp_path), token=TOKEN)


@pytest.mark.usefixtures("few_pauses")
def test_who_shows_no_certificate_does_not_get_in(address: str, ours: Path) -> None:
    credentials = grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        talk = channel.stream_stream("/juggler.simulator.v1.Simulator/Session")
        said = pb.FromSimulator(hello=hello()).SerializeToString()
        call = talk(iter([said]), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.usefixtures("few_pauses")
def test_who_comes_without_tls_is_told_to_look_at_that(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUGGLER_TLS", raising=False)
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        dial(address, token=TOKEN)


# Where gateways listen.


def free_port(behind: int) -> int:
    """A free port, with another free one N behind it."""
    while True:
        port = int(free_address().rpartition(":")[2])
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + behind)):
            return port


def test_a_gateway_that_dials_in_listens_at_exactly_the_port_that_it_was_given(
    tmp_path: Path,
) -> None:
    port = free_port(3)
    world = AgentsWorld(
        tmp_path, {"*": "all"}, f"127.0.0.1:{port}", local=False, worker_id="envrunner-3"
    )
    world.close()
    assert world.address == f"127.0.0.1:{port}"


@pytest.mark.parametrize(("local", "end"), [(True, "-3"), (False, "")])
def test_a_gateway_takes_simulators_at_a_unix_socket(tmp_path: Path, local: bool, end: str) -> None:
    address = f"unix:{tmp_path}/gateway"
    EnvRunnerConfig(gateway=address)
    world = AgentsWorld(tmp_path, {"*": "all"}, address, local=local, worker_id="envrunner-3")
    with connect_agents(f"{address}{end}", {"one": SPACES}, token="secret"):
        assert stat.S_IMODE(os.stat(f"{tmp_path}/gateway{end}").st_mode) == 0o600
    world.close()


def test_gateways_that_a_driver_starts_listen_at_ports_that_follow_each_other(
    tmp_path: Path,
) -> None:
    port = free_port(3)
    world = AgentsWorld(tmp_path, {"*": "all"}, f"127.0.0.1:{port}", worker_id="envrunner-3")
    world.close()
    assert world.address == f"127.0.0.1:{port + 3}"


# Half-open connections: nothing comes through, and nothing closes them.


#: Found within three seconds, instead of half a minute.
_SOON = {
    "grpc.keepalive_time_ms": 500,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
}
_FREQUENT = {"grpc.http2.min_ping_interval_without_data_ms": 100}


@pytest.fixture
def found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {**dict(transport.OPTIONS), **_SOON, **_FREQUENT}
    monkeypatch.setattr(transport, "OPTIONS", list(served.items()))
    dialed = {**dict(connection._OPTIONS), **_SOON}
    monkeypatch.setattr(connection, "_OPTIONS", list(dialed.items()))


@pytest.mark.usefixtures("found_soon")
@pytest.mark.slow  # until the clocks of gRPC find out
def test_who_comes_back_in_time_goes_on_where_it_was() -> None:
    with Network() as network, GatewayWorld(rows=1, steps=100, resume_seconds=20) as world:
        world.ask()
        session = connect(network.link(world.address), THREE, TWO_WAYS)
        session.step(np.zeros(3))
        session.step(np.zeros(3), 1.0)
        network.cut()
        actions: list[Any] = []
        thread = threading.Thread(
            target=lambda: actions.append(session.step(np.ones(3), 2.0)), name="simulator"
        )
        thread.start()
        (there,) = world._server.manager.sessions.by_id.values()
        world.changes.wait_for(lambda: there.stream is None)  # the gateway has found out
        assert not actions
        network.heal()
        thread.join(30)
        assert actions
        session.step(np.ones(3), 3.0)
        assert world.count("sessions_resumed") >= 1
        assert world.count("sessions_lost") == 0
        assert world.count("steps") == 3, "what was sent again is not counted again"
        session.close()


# A policy that never answers.


class Loops(TinyPolicy):
    """Never comes out of its forward pass until it is told to."""

    over = threading.Event()

    def forward_exploration(self, batch: Any) -> Any:
        while batch["observations"].any() and not self.over.is_set():
            self.over.wait(60)
        return super().forward_exploration(batch)


@contextmanager
def attached(directory: Path, events: Mailbox[Any]) -> Iterator[Attachment]:
    settings = HubSettings(
        run_id="run", roles=("envrunner",), heartbeat_seconds=0.05, hang_seconds=1.0
    )
    hub = Hub(settings, events)
    (address,) = hub.start([f"unix:{directory}/hub"])
    attachment = Attachment(Contact(address), "envrunner", Mailbox())
    attachment.held_up_by = policy_in
    try:
        yield attachment
    finally:
        attachment.close()
        hub.close()


def test_inference_that_never_returns_is_found_by_the_deadline_of_hangs(tmp_path: Path) -> None:
    Loops.over.clear()
    events: Mailbox[Any] = Mailbox()
    with (
        attached(tmp_path, events) as attachment,
        GatewayWorld(Loops, rows=1) as world,
        RawSimulator(world.address) as simulator,
    ):
        world.ask()
        simulator.greet()
        simulator.step(steps_of(1))  # the first pass of all may take its time
        world._server._busy = attachment.busy
        simulator.send(steps=steps_of(2, ((1.0, 1.0, 1.0),)))
        deadline = time.monotonic() + 30
        left: list[WorkerLeft] = []
        while not left and time.monotonic() < deadline:
            left += [event for event in events.gather(0.1) if isinstance(event, WorkerLeft)]
        Loops.over.set()
        assert simulator.hear().actions.seq == 2
    assert left[0].reason.startswith("hung in inference by Loops: no progress for")
    assert "forward_exploration" in left[0].stack


def test_a_gateway_that_waits_for_simulators_is_not_busy() -> None:
    busy = threading.Event()

    @contextmanager
    def work() -> Iterator[None]:
        busy.set()
        yield
        busy.clear()

    with GatewayWorld(busy=work) as world:
        world.ask()
        with world.connect() as session:
            session.step([0.0, 0.0, 0.0])
            world.changes.wait_for(lambda: not busy.is_set())
            assert busy.wait(30), "and now and then it is"


# Hundreds of simulators that vanish, beside ones that stay.


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
