"""Weights from a learner to its EnvRunners: the learner's end of the stream."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import grpc
from google.protobuf.message import DecodeError, Message

from juggler.runtime.actors.calls import calls
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.streams.memory_sockets import MemorySocket
from juggler.runtime.streams.memory_writer import FrozenFrame, Writer
from juggler.runtime.streams.sharing import Expected, expected
from juggler.runtime.streams.weights import SUBSCRIBE_METHOD
from juggler.runtime.wire.chunks import with_digest
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

_SERVICE, _METHOD = SUBSCRIBE_METHOD.strip("/").split("/")


class _Offered:
    """A version to send. A chunk is serialized for the first subscriber who takes it, and so is the
    memory that subscribers of this host share."""

    def __init__(self, module_id: str, version: Version, tree: Tree, digests: bool) -> None:
        self.version = version
        header = episodes_pb2.WeightsHeader(module_id=module_id, version=version.message())
        self._lock = threading.Lock()
        self._coming = encode_frame(header, tree, digest=digests)
        self._digests = digests
        self._chunks: list[bytes] = []  # that somebody has taken
        self._whole: tuple[Message, Tree] | None = (header, tree)  # until somebody shares it
        self._frozen: FrozenFrame | None = None

    def chunks(self, digests: bool, writer: Writer | None) -> Iterator[bytes]:
        """All of them: in shared memory if that goes, else the same for everybody.

        Args:
            digests: whether those with a payload have digests.
            writer: of whoever asks; None: nothing is shared with it.
        """
        chunk = None if writer is None else self._frozen_frame().chunk(writer)
        return self._inline(digests) if chunk is None else iter((chunk,))

    def _frozen_frame(self) -> FrozenFrame:
        with self._lock:
            if self._frozen is None:
                assert self._whole is not None
                self._frozen, self._whole = FrozenFrame(*self._whole), None
            return self._frozen

    def _inline(self, digests: bool) -> Iterator[bytes]:
        for number in itertools.count():
            with self._lock:
                if digests and not self._digests:
                    self._digests, self._chunks = True, list(map(with_digest, self._chunks))
                    self._coming = map(with_digest, self._coming)
                if number == len(self._chunks):
                    self._chunks.extend(itertools.islice(self._coming, 1))
                if number == len(self._chunks):
                    return
                chunk = self._chunks[number]
            yield chunk


class _Subscriber:
    """Where a stream is.

    Attributes:
        module_id: of the module whose weights it carries.
        changed: told when it may have to go on, or to end.
        idle: whether it has all of the version sent last; with the publisher's lock, as `sent`.
        sent: that version, or the one it is being sent.
        chunks: those left of it.
        shared: memory with it, if it is on this host.
    """

    def __init__(self, module_id: str, lock: threading.Lock, shared: Expected[Writer]) -> None:
        self.module_id = module_id
        self.shared = shared
        self.changed = threading.Condition(lock)
        self.idle = True
        self.sent: Version | None = None
        self.chunks: Iterator[bytes] = iter(())


class WeightsPublisher:
    """The learner's end: serializes each version of a module's weights once, and streams the newest
    one to every subscriber of that module.

    On gRPC's core, the thread of a subscriber's stream sends the first chunk after a wait, and the
    server's thread sends all others. As long as all subscribers came over Unix sockets, chunks have
    no digests: their bytes only pass through the memory of this host.

    Large weights lie once in memory that all subscribers of this host read.

    Args:
        why_refused: returns why a call may not open a stream, given its metadata; None lets it in.
        memory: where subscribers of this host connect to share memory; None: they cannot.
    """

    def __init__(
        self,
        why_refused: Callable[[CallMetadata], str | None],
        memory: MemorySocket | None = None,
    ) -> None:
        self._why_refused = why_refused
        self._memory = memory
        self._lock = threading.Lock()
        self._subscribers: set[_Subscriber] = set()
        self._newest: dict[str, _Offered] = {}  # by module id
        self._digests = False  # whether anybody needs them
        self._closed = False

    def publish(self, version: Version, tree: Tree, module_id: str = DEFAULT_MODULE) -> None:
        """Offer a version of a module's weights, newer than those before. Nobody may change the
        arrays any more.

        Args:
            version: of these weights.
            tree: name -> array, under the module's id.
            module_id: of the module.

        Raises:
            WireError: the tree holds what cannot be sent.
            ValueError: the version is not newer than the one before.
        """
        offered = _Offered(module_id, version, tree, self._digests)
        with self._lock:
            before = self._newest.get(module_id)
            if before is not None and version <= before.version:
                raise ValueError(f"weights version {version} comes after {before.version}")
            self._newest[module_id] = offered
            for subscriber in self._subscribers:
                if subscriber.idle and subscriber.module_id == module_id:
                    subscriber.changed.notify()

    def withdraw(self, module_id: str) -> None:
        """Offer nothing of this module any more. Its subscribers wait for it to come back."""
        with self._lock:
            self._newest.pop(module_id, None)

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        self._wake_all()

    def handler(self) -> grpc.GenericRpcHandler:
        """To add to a server."""
        # With a stream of requests, of which one is read: a method with a single request would wait
        # for it, in a thread, before the token is looked at.
        subscribe: grpc.RpcMethodHandler[bytes, bytes]
        subscribe = grpc.stream_stream_rpc_method_handler(self._subscribe)
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: subscribe})

    def _subscribe(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        if refusal := self._why_refused(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        if not context.peer().startswith("unix:"):
            self._digests = True  # in all streams, so that a version is serialized once
        try:
            request = episodes_pb2.Subscription.FromString(next(requests))
        except (StopIteration, DecodeError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream of weights of no module")
        with closing(expected(self._memory, context, Writer)) as shared:
            subscriber = _Subscriber(request.module_id, self._lock, shared)
            stream = calls().ServerStream(requests, context, partial(self._next_chunk, subscriber))
            context.add_callback(self._wake_all)  # a subscriber that goes frees its thread
            with self._lock:
                self._subscribers.add(subscriber)
            try:
                while self._is_behind(subscriber, context):
                    yield from stream.send()
            finally:
                with self._lock:
                    self._subscribers.remove(subscriber)
        stream.check()

    def _is_behind(self, subscriber: _Subscriber, context: grpc.ServicerContext) -> bool:
        """Waits until an idle subscriber is to be sent something; false: its stream is to end."""
        with self._lock:
            while not (subscriber.idle and self._news_for(subscriber)):
                if (self._closed and subscriber.idle) or not context.is_active():
                    return False
                subscriber.changed.wait()
            subscriber.idle = False
            return True

    def _next_chunk(self, subscriber: _Subscriber) -> bytes | None:
        """Of the version that it is being sent, or else of the newest."""
        chunk = next(subscriber.chunks, None)
        if chunk is None and (offered := self._other_than(subscriber)) is not None:
            subscriber.chunks = offered.chunks(self._digests, subscriber.shared.end)
            chunk = next(subscriber.chunks)
        return chunk

    def _other_than(self, subscriber: _Subscriber) -> _Offered | None:
        """Another version than the one sent last."""
        with self._lock:
            offered = self._news_for(subscriber)
            if offered is None:
                subscriber.idle = True
                if self._closed:
                    subscriber.changed.notify()
                return None
            subscriber.sent = offered.version
            return offered

    def _news_for(self, subscriber: _Subscriber) -> _Offered | None:
        """Its module's newest version, if that is not the one sent last. With the lock held."""
        offered = self._newest.get(subscriber.module_id)
        return None if offered is None or offered.version == subscriber.sent else offered

    def _wake_all(self) -> None:
        with self._lock:
            for subscriber in self._subscribers:
                subscriber.changed.notify()
