"""A learner that publishes weights, and readers of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from juggler.runtime.actors.credentials import CallMetadata, call_metadata, why_refused
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.host_weights import Meeting
from juggler.runtime.streams.memory_socket import MemorySocket, memory_path
from juggler.runtime.streams.weights_stream import (
    SUBSCRIBE_METHOD,
    Weights,
    WeightsPublisher,
    WeightsSubscription,
)
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.v1 import episodes_pb2
from support.changes import Changes

PATIENCE = 60.0  # seconds until a test fails; nothing takes as long
METADATA = call_metadata("secret", "run", "incarnation")
LARGE = 4 << 20  # elements of float32: sixteen MiB, more than gRPC and the socket hold


def weights_tree(version: Version, size: int = 4) -> dict[str, Any]:
    """A tree that only this version has."""
    values = np.full(size, 1000 * version.generation + version.update, np.float32)  # [size]
    return {"default": {"weight": values}}


class _Watched(threading.Condition):
    """Notes a change at each release of its lock."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = changes

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._changes.note()


class Learner:
    """A server on a path, with a publisher; may be restarted.

    Attributes:
        came: can be acquired once for each stream that has come.
        changes: of its streams.
    """

    def __init__(self, directory: Path, max_streams: int = 8) -> None:
        self.address = f"unix:{directory / 'l'}"
        self.came = threading.Semaphore(0)
        self.changes = Changes()
        self._max_streams = max_streams
        self.start()

    def start(self, handler: grpc.GenericRpcHandler | None = None) -> None:
        """Listen, with a new publisher or with something else that answers."""
        self._threads = ThreadPoolExecutor(self._max_streams, thread_name_prefix="learner")
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        self.memory = MemorySocket(self.address)
        self.publisher = WeightsPublisher(self._why_refused, self.memory)
        self.publisher._changed = _Watched(self.changes)
        self._server.add_generic_rpc_handlers((handler or self.publisher.handler(),))
        bind(self._server, self.address)
        self.tcp_address = bind(self._server, "127.0.0.1:0")
        self._server.start()

    def publish(self, generation: int, update: int, size: int = 4) -> Version:
        version = Version(generation, update)
        self.publisher.publish(version, weights_tree(version, size))
        return version

    def stop(self) -> None:
        """Stop like a killed process; every thread has to end."""
        assert self._server.stop(grace=None).wait(PATIENCE)
        self._threads.shutdown(wait=True)
        self.memory.close()

    def _why_refused(self, metadata: CallMetadata) -> str | None:
        self.came.release()
        return why_refused(metadata, token="secret", run_id="run")


def same(weights: Weights, version: Version, size: int = 4) -> bool:
    np.testing.assert_equal(weights.tree, weights_tree(version, size))
    return weights.version == version


def subscribe_by_hand(channel: grpc.Channel) -> Any:
    """A stream of weights that only the test reads."""
    request = episodes_pb2.Subscription(
        module_id="default", subscriber="envrunner-0"
    ).SerializeToString()
    return channel.unary_stream(SUBSCRIBE_METHOD)(request, metadata=METADATA, timeout=PATIENCE)


def read_weights(call: Any, reader: FrameReader[episodes_pb2.WeightsHeader]) -> Version:
    """The version of the next weights on a stream."""
    frame = None
    while frame is None:
        frame = reader.feed(next(call))
    version = Version.of(frame.header.version)
    assert isinstance(frame.tree, dict)
    assert frame.tree["default"]["weight"][-1] == 1000 * version.generation + version.update
    return version


def weights_frame(version: Version) -> bytes:
    header = episodes_pb2.WeightsHeader(version=version.message())
    (chunk,) = encode_frame(header, weights_tree(version), digest=True)
    return chunk


class Scripted:
    """Serves given messages on the first call, then nothing."""

    def __init__(self, first: list[bytes], later: list[bytes] | None = None) -> None:
        self._first = first
        self._later = later or []
        self._calls = 0
        self._changed = threading.Condition()

    def handler(self) -> grpc.GenericRpcHandler:
        service, method = SUBSCRIBE_METHOD.strip("/").split("/")
        serve = grpc.unary_stream_rpc_method_handler(self._serve)
        return grpc.method_handlers_generic_handler(service, {method: serve})

    def wait_for_calls(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._calls >= calls, PATIENCE)

    def _serve(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._changed:
            self._calls += 1
            first = self._calls == 1
            self._changed.notify_all()
        return iter(self._first if first else self._later)


SIZE = 50_000  # elements of float32

Join = Callable[..., WeightsSubscription]


def readers_stay(server: Learner, number: int) -> None:
    """Wait until N readers are at the learner."""
    there = server.publisher._subscribers
    server.changes.wait_for(lambda: len(there) == number, f"{number} readers are not left")


def relaying(readers: list[WeightsSubscription]) -> list[WeightsSubscription]:
    return [each for each in readers if each._relay is not None]


class Seen(NamedTuple):
    """What a reader has."""

    version: Version
    value: float  # of every element
    relays: bool
    follows: bool
    notes: list[str]


class ReaderProcess:
    """A subscription in a process of its own."""

    def __init__(self, address: str, *secret: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_read, args=(theirs, address, secret), daemon=True)
        self._process.start()
        theirs.close()

    def see(self, at_least: Version, seconds: float = PATIENCE) -> Seen:
        """What it has as soon as that is at least this version."""
        self._ours.send((tuple(at_least), seconds))
        assert self._ours.poll(seconds + PATIENCE)
        answer = self._ours.recv()
        if isinstance(answer, str):
            raise TimeoutError(answer)
        return Seen(*answer)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == STOP:  # until one of its threads reads that, the others continue
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """Kill it, even where it is stopped."""
        self._process.kill()
        self._process.join(PATIENCE)


def _read(connection: Connection, address: str, secret: tuple[str, ...]) -> None:
    notes: list[str] = []
    reader = WeightsSubscription(
        address,
        METADATA,
        "envrunner-0",
        retry_seconds=0.0,
        meeting=Meeting(*secret),
        alone=notes.append,
    )
    while True:
        try:
            at_least, seconds = connection.recv()
        except EOFError:
            return
        try:
            weights: Any = reader.wait_for(Version(*at_least), seconds)
        except TimeoutError as error:
            connection.send(str(error))
            continue
        values = weights.tree["default"]["weight"]
        assert values.min() == values.max()
        relays, follows = reader._relay is not None, reader._relay_connection is not None
        connection.send((weights.version, float(values[0]), relays, follows, notes))


def names_of(meeting: Meeting) -> list[int]:
    """The numbers of its names that some process has bound."""
    bound = Path("/proc/net/unix").read_text()
    paths = [memory_path(meeting.address(number)) for number in range(3)]
    return [n for n, path in enumerate(paths) if f"@{path[1:]}" in bound or _is_socket(path)]


def _is_socket(path: str) -> bool:
    return not path.startswith("\0") and Path(path).is_socket()


STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
