"""The learner's end of the stream of weights."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import grpc
from google.protobuf.message import DecodeError, Message

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.streams.shared_memory import FrozenFrame, SharedMemoryWriter
from juggler.runtime.streams.sharing import MemorySocket, ServerEnd
from juggler.runtime.streams.weights import SUBSCRIBE_METHOD
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

_SERVICE, _METHOD = SUBSCRIBE_METHOD.strip("/").split("/")


class _Offered:
    """A version to send."""

    def __init__(self, module_id: str, version: Version, tree: Tree) -> None:
        self.version = version
        header = episodes_pb2.WeightsHeader(module_id=module_id, version=version.message())
        self._lock = threading.Lock()
        self._coming = encode_frame(header, tree, digest=True)
        self._chunks: list[bytes] = []  # that were sent to a subscriber
        self._whole: tuple[Message, Tree] | None = (header, tree)  # until it is in shared memory
        self._frozen: FrozenFrame | None = None

    def chunks(self, writer: SharedMemoryWriter | None) -> Iterator[bytes]:
        """Yield all chunks: in shared memory if possible, otherwise inline.

        Args:
            writer: of the subscriber; None: no shared memory.
        """
        chunk = None if writer is None else self._frozen_frame().chunk(writer)
        return self._inline() if chunk is None else iter((chunk,))

    def _frozen_frame(self) -> FrozenFrame:
        with self._lock:
            if self._frozen is None:
                assert self._whole is not None
                self._frozen, self._whole = FrozenFrame(*self._whole), None
            return self._frozen

    def _inline(self) -> Iterator[bytes]:
        for number in itertools.count():
            with self._lock:
                if number == len(self._chunks):
                    self._chunks.extend(itertools.islice(self._coming, 1))
                if number == len(self._chunks):
                    return
                chunk = self._chunks[number]
            yield chunk


class WeightsPublisher:
    """Streams the newest weights of each module to its subscribers.

    Large weights are stored once, in memory that all subscribers of this host read.

    Args:
        why_refused: returns why a call may not open a stream, given its metadata; None admits it.
        memory: socket at which subscribers of this host connect to share memory; None: impossible.
    """

    def __init__(
        self,
        why_refused: Callable[[CallMetadata], str | None],
        memory: MemorySocket | None = None,
    ) -> None:
        self._why_refused = why_refused
        self._memory = memory
        self._changed = threading.Condition()
        self._subscribers: set[ServerEnd[SharedMemoryWriter]] = set()
        self._newest: dict[str, _Offered] = {}  # by module id
        self._closed = False

    def publish(self, version: Version, tree: Tree, module_id: str = DEFAULT_MODULE) -> None:
        """Offer a newer version of a module's weights.

        The arrays must not change any more.

        Args:
            version: of these weights.
            tree: name -> array, under the module's id.
            module_id: of the module.

        Raises:
            WireError: the tree has a value that cannot be sent.
            ValueError: the version is not newer than the last one.
        """
        offered = _Offered(module_id, version, tree)
        with self._changed:
            before = self._newest.get(module_id)
            if before is not None and version <= before.version:
                raise ValueError(f"weights version {version} comes after {before.version}")
            self._newest[module_id] = offered
            self._changed.notify_all()

    def withdraw(self, module_id: str) -> None:
        """Stop offering a module; its subscribers wait for its return."""
        with self._changed:
            self._newest.pop(module_id, None)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._wake_all()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server."""
        # With a stream of requests, of which one is read: a method with a single request would
        # wait for it, in a thread, before the token is checked.
        subscribe: grpc.RpcMethodHandler[bytes, bytes]
        subscribe = grpc.stream_stream_rpc_method_handler(self._subscribe)
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: subscribe})

    def _subscribe(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        if refusal := self._why_refused(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        try:
            request = episodes_pb2.Subscription.FromString(next(requests))
        except (StopIteration, DecodeError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream of weights of no module")
        with closing(ServerEnd(self._memory, context, SharedMemoryWriter)) as shared:
            context.send_initial_metadata(())  # at once: the subscriber waits for it
            context.add_callback(self._wake_all)  # a leaving subscriber frees its thread
            with self._changed:
                self._subscribers.add(shared)
            sent: Version | None = None
            try:
                while (offered := self._after(request.module_id, sent, context)) is not None:
                    sent = offered.version
                    yield from offered.chunks(shared.end)
                    del offered
            finally:
                with self._changed:
                    self._subscribers.remove(shared)

    def _after(
        self, module_id: str, sent: Version | None, context: grpc.ServicerContext
    ) -> _Offered | None:
        """Wait for a version other than the last one sent.

        None: the stream should end.
        """
        with self._changed:
            while context.is_active():
                newest = self._newest.get(module_id)
                if newest is not None and newest.version != sent:
                    return newest
                if self._closed:
                    break
                self._changed.wait()
        return None

    def _wake_all(self) -> None:
        with self._changed:
            self._changed.notify_all()
