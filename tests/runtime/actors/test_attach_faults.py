"""Attach streams when one side says or does what it should not, or stands still."""

from __future__ import annotations

import contextlib
import queue
import socket
import time

import pytest
from support.hub_world import World

from juggler.runtime.actors.attachment import AttachError, describe
from juggler.runtime.actors.endpoints import PROTOCOL_VERSION, dial
from juggler.runtime.actors.hub import ATTACH_METHOD
from juggler.runtime.actors.hub_events import Joined, Left, Replied
from juggler.runtime.wire.v1 import attach_pb2

# Frames of HTTP/2: 3 bytes of length, the type, flags, and 4 bytes of the stream.
EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PING_HEADER = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0])


def test_a_failure_of_any_length_fits_a_message(world: World) -> None:
    world.start()
    world.attach().fail(1, OSError("x" * 9_000_000))
    failure = world.wait_for(Replied).reply.failure
    assert failure.message.startswith("OSError: xxx")
    assert failure.message.endswith("xxx")
    assert len(failure.message) < 100_000


def test_a_failure_may_hold_what_utf8_cannot() -> None:
    assert "robot-\\udc80.urdf" in describe(OSError("no file robot-\udc80.urdf")).message


def test_a_worker_that_reads_nothing_can_be_let_go(world: World) -> None:
    world.start(hang_seconds=1e9)
    outgoing: queue.SimpleQueue[attach_pb2.FromWorker | None] = queue.SimpleQueue()
    hello = attach_pb2.Hello(protocol_version=PROTOCOL_VERSION, role="worker", incarnation="i")
    outgoing.put(attach_pb2.FromWorker(hello=hello))
    channel = dial(world.address)
    call = channel.stream_stream(
        ATTACH_METHOD,
        request_serializer=attach_pb2.FromWorker.SerializeToString,
        response_deserializer=attach_pb2.ToWorker.FromString,
    )(iter(outgoing.get, None))
    worker = world.wait_for(Joined).worker
    for command_id in range(40):  # more than a stream's window takes
        world.hub.send(worker, command_id, attach_pb2.Refusal(reason="x" * 1_000_000))
    time.sleep(0.3)  # the hub is writing by now
    world.hub.dismiss(worker, "enough")
    assert world.wait_for(Left).reason == "enough"
    outgoing.put(None)
    call.cancel()
    channel.close()


def _all_of(peer: socket.socket) -> bytes:
    """What a peer has said once it has said nothing for as long as the socket's timeout.

    Raises:
        ConnectionError: it hung up.
    """
    heard = b""
    with contextlib.suppress(TimeoutError):
        while more := peer.recv(1024):
            heard += more
        raise ConnectionError("the peer hung up")
    return heard


@pytest.mark.long
def test_grpc_ends_no_connection_because_a_ping_stays_unanswered(world: World) -> None:
    """A hub that stood still cannot tell that an answer is there already. It watches for silence
    itself."""
    world.start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(world.address.removeprefix("unix:"))
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + EMPTY_SETTINGS)
        peer.settimeout(33)  # 20 until the ping, and 10 more is what other servers allow
        assert PING_HEADER in _all_of(peer), "it asks"


def test_a_role_may_have_a_limit(world: World) -> None:
    world.start(most_of={"other": 1})
    first = world.attach("other")
    with pytest.raises(AttachError, match="has its 1 other already"):
        world.attach("other")
    for _ in range(3):
        world.attach("worker")
    successor = world.attach("other", index=0)  # of a process that may be dead
    assert successor.worker_id == first.worker_id
