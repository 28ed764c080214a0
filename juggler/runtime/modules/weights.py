"""Weights from a learner to its envrunners: the stream's two ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.tls import Tls
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.chunks import with_digest
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, Limits, encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

SUBSCRIBE_METHOD = "/juggler.v1.Weights/Subscribe"
_SERVICE, _METHOD = SUBSCRIBE_METHOD.strip("/").split("/")


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters and buffers: a tree module id -> name -> array, read-only."""

    version: Version
    tree: Tree


class _Offered:
    """A version to send. The first who takes it serializes it, beside the publisher's thread."""

    def __init__(self, version: Version, tree: Tree, digests: bool) -> None:
        self.version = version
        header = episodes_pb2.WeightsHeader(version=version.message())
        self._lock = threading.Lock()
        self._coming = encode_frame(header, tree, digest=digests)
        self._digests = digests
        self._chunks: list[bytes] = []

    def chunks(self, digests: bool) -> list[bytes]:
        """All of them, the same for everybody."""
        with self._lock:
            self._chunks.extend(self._coming)
            if digests and not self._digests:
                self._digests, self._chunks = True, list(map(with_digest, self._chunks))
            return self._chunks


class WeightsPublisher:
    """The learner's end: serializes a version once, and streams the newest to every subscriber.

    As long as all of them came over Unix sockets there are no digests: between two processes of
    one host there is only memory, as there is within one.
    """

    def __init__(self, why_refused: Callable[[CallMetadata], str | None]) -> None:
        self._why_refused = why_refused
        self._condition = threading.Condition()
        self._newest: _Offered | None = None
        self._digests = False  # whether anybody needs them
        self._closed = False

    def publish(self, version: Version, tree: Tree) -> None:
        """Offer a version, newer than those before; nobody changes its arrays any more.

        Raises:
            WireError: the tree holds what cannot be sent.
        """
        offered = _Offered(version, tree, self._digests)
        with self._condition:
            if self._newest is not None and version <= self._newest.version:
                raise ValueError(f"weights version {version} comes after {self._newest.version}")
            self._newest = offered
            self._condition.notify_all()

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        self._wake()

    def handler(self) -> grpc.GenericRpcHandler:
        """To add to a server."""
        subscribe: grpc.RpcMethodHandler[episodes_pb2.Subscription, bytes]
        subscribe = grpc.unary_stream_rpc_method_handler(
            self._subscribe,
            request_deserializer=episodes_pb2.Subscription.FromString,
            response_serializer=None,  # chunks are bytes already
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: subscribe})

    def _subscribe(
        self, _: episodes_pb2.Subscription, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        if refusal := self._why_refused(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        if not context.peer().startswith("unix:"):
            self._digests = True  # in all streams, so that a version is serialized once
        context.add_callback(self._wake)  # a subscriber that goes frees its thread
        sent: Version | None = None
        while offered := self._other_than(sent, context):
            sent = offered.version
            yield from offered.chunks(self._digests)
            del offered  # its memory serves for the next one

    def _other_than(self, sent: Version | None, context: grpc.ServicerContext) -> _Offered | None:
        """Waits for another version than the one sent last; None when the stream is to end."""
        with self._condition:
            while self._newest is None or self._newest.version == sent:
                if self._closed or not context.is_active():
                    return None
                self._condition.wait()
            return self._newest

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()


class WeightsSubscription:
    """The envrunner's end: a thread that always holds the newest weights it was sent.

    Dials again, every `retry_seconds`, when the stream breaks; until `close`. What else goes wrong
    in the thread ends it, and is raised at whoever asks for weights.

    Attributes:
        address: of the learner.
    """

    def __init__(
        self,
        address: str,
        metadata: CallMetadata,
        subscriber: str,
        limits: Limits,
        retry_seconds: float = 0.5,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self._metadata = metadata
        self._subscriber = subscriber
        self._limits = limits
        self._retry_seconds = retry_seconds
        self._condition = threading.Condition()
        self._newest: Weights | None = None
        self._closed = threading.Event()
        self._error = ""
        self._failure: BaseException | None = None
        self._channel = dial(address, tls, one_thread=True)
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    @property
    def newest(self) -> Weights | None:
        """The newest weights; None before there are any.

        Raises:
            Exception: of the thread, which brings no more.
        """
        if self._failure is not None:
            raise self._failure
        return self._newest

    def wait_for(self, version: Version, timeout: float) -> Weights:
        """The newest weights, as soon as they are at least `version`.

        Raises:
            TimeoutError: they did not come in time; says what was seen last.
            Exception: as for `newest`.
        """
        with self._condition:
            if not self._condition.wait_for(
                lambda: (newest := self.newest) is not None and newest.version >= version, timeout
            ):
                seen = self._newest.version if self._newest else "none"
                raise TimeoutError(
                    f"no weights of version {tuple(version)} from the learner at {self.address} "
                    f"within {timeout:.0f} s (newest: {seen}). {self._error}"
                )
            assert self._newest is not None
            return self._newest

    def close(self) -> None:
        self._closed.set()
        self._channel.close()

    def _run(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            # Of a channel that was closed meanwhile nothing else is to be expected.
            if not self._closed.is_set():
                with self._condition:
                    self._failure = error
                    self._condition.notify_all()

    def _receive(self) -> None:
        subscribe: grpc.UnaryStreamMultiCallable[episodes_pb2.Subscription, bytes]
        subscribe = self._channel.unary_stream(
            SUBSCRIBE_METHOD,
            request_serializer=episodes_pb2.Subscription.SerializeToString,
            response_deserializer=None,
        )
        digests = not self.address.startswith("unix:")
        while not self._closed.is_set():
            reader = FrameReader(episodes_pb2.WeightsHeader, self._limits, digests=digests)
            try:
                request = episodes_pb2.Subscription(subscriber=self._subscriber)
                for message in subscribe(request, metadata=self._metadata, wait_for_ready=True):
                    frame = reader.feed(message)
                    if frame is not None:
                        self._take(Weights(Version.of(frame.header.version), frame.tree))
            except grpc.RpcError as error:
                self._error = str(error.details() if hasattr(error, "details") else error)
            except WireError as error:
                self._error = f"bad weights: {error}"
            self._closed.wait(self._retry_seconds)

    def _take(self, weights: Weights) -> None:
        with self._condition:
            # A learner that restarted may offer older weights; nobody goes back to them.
            if self._newest is None or weights.version > self._newest.version:
                self._newest = weights
                self._condition.notify_all()
