"""The stream of weights: a learner publishes them, EnvRunners subscribe.

If weights are large, one reader of a host relays them to the other readers (`host_weights`), which
then disconnect from the learner.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from juggler.runtime.actors.calls import FirstAnswer
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.tls import Tls
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.streams.host_weights import (
    Meeting,
    RelayConnection,
    WeightsFrame,
    WeightsRelay,
)
from juggler.runtime.streams.memory_socket import ClientEnd, MemorySocket, ServerEnd
from juggler.runtime.streams.shared_memory import (
    FrozenFrame,
    SharedMemoryReader,
    SharedMemoryWriter,
    least_bytes,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame, lay_out
from juggler.runtime.wire.layouts import MOST_PAYLOAD_BYTES
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

SUBSCRIBE_METHOD = "/juggler.v1.Weights/Subscribe"

_END_SECONDS = 1.0  # wait for the thread of a closed reader


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters and buffers: a tree module id -> name -> array, read-only."""

    version: Version
    tree: Tree


class WeightsSubscription:
    """Receives the newest weights in a thread.

    Until `close`, dials again every `retry_seconds` if the stream breaks or is not answered. Other
    errors end the thread, and are raised when weights are asked for.

    Large weights are relayed by another reader of this host, or by this one.

    Attributes:
        address: of the learner.
        answered: the learner has answered a stream, and sends weights once it has some.
    """

    def __init__(
        self,
        address: str,
        metadata: CallMetadata,
        subscriber: str,
        retry_seconds: float = 0.5,
        tls: Tls | None = None,
        module_id: str = DEFAULT_MODULE,
        inline: Callable[[str], None] | None = None,
        memory: str = "",
        meeting: Meeting | None = None,
        alone: Callable[[str], None] | None = None,
        most_bytes: int = MOST_PAYLOAD_BYTES,
    ) -> None:
        """Subscribe, in a thread that starts here.

        Args:
            address: of the learner.
            metadata: of the call.
            subscriber: the worker's id.
            retry_seconds: from the end of a stream to the next one.
            tls: of this host; None: no TLS.
            module_id: of the module.
            inline: called with the reason, for people, if the learner is on this host and shares no
                memory.
            memory: the address of the learner's socket in the shared directory; "": none.
            meeting: meeting place of this host's readers; None: always read from the learner.
            alone: called with the reason, for people, if this reader cannot take part.
            most_bytes: of one version.
        """
        self.address, self.answered = address, False
        self._meeting, self._alone = meeting, alone
        self._relay: WeightsRelay | None = None  # if this process relays
        self._relay_connection: RelayConnection | None = None  # if another one does
        self._large = False  # whether weights have proved to be large
        self._inline, self._memory = inline, memory
        self._module_id = module_id
        self._metadata = metadata
        self._subscriber = subscriber
        self._most_bytes = most_bytes
        self._retry_seconds = retry_seconds
        # The thread replaces `_newest` as a whole, so `newest` needs no lock.
        self._condition = threading.Condition()
        self._newest: Weights | None = None
        self._closed = threading.Event()
        self._error = ""
        self._failure: BaseException | None = None
        self._tls = tls
        self._channel = self._dial()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Weights | None:
        """Return the newest weights; None before the first ones.

        Raises:
            Exception: the error that ended the thread.
        """
        if self._failure is not None:
            raise self._failure
        return self._newest

    def wait_for(self, version: Version, timeout: float) -> Weights:
        """Wait until the newest weights are at least `version`; return them.

        Raises:
            TimeoutError: they did not come in time; has the last version.
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
        if (connection := self._relay_connection) is not None:
            connection.interrupt()
        self._thread.join(_END_SECONDS)  # a relay removes its socket

    def _dial(self) -> grpc.Channel:
        return dial(self.address, self._tls, one_thread=True)

    def _run(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            # Expected from a channel that was closed in between.
            if not self._closed.is_set():
                with self._condition:
                    self._failure = error
                    self._condition.notify_all()
        finally:
            self._stop_relaying()

    # -- from another process of this host -------------------------------------------------------

    def _receive(self) -> None:
        first = 0
        while not self._closed.is_set():
            if self._relay is None and self._relay_connection is None:
                self._meet(first)
            first = 0
            if self._relay_connection is None:
                self._read()  # until it breaks, or another process relays
            else:
                first = self._follow(self._relay_connection)

    def _meet(self, first: int = 0) -> None:
        """Find the relaying reader, or become it if weights are large."""
        if self._meeting is None:
            return
        try:
            found = self._meeting.find(may_relay=self._large, first=first)
        except OSError as error:
            self._be_alone(f"{error.strerror or error}")
            return
        if isinstance(found, RelayConnection):
            self._relay_connection = found
        else:
            self._relay = found

    def _follow(self, connection: RelayConnection) -> int:
        """Receive relayed weights until the relay ends.

        Returns:
            The first name at which another process may relay.
        """
        reader = FrameReader(episodes_pb2.WeightsHeader, self._most_bytes, lease=connection.lease)
        received = False
        try:
            while not self._closed.is_set():
                chunk = connection.next_chunk()
                received = self._large = True  # small weights are not relayed
                if chunk is not None and (frame := reader.feed(chunk)) is not None:
                    self._take(frame)
                    del frame
        # A relay that hangs keeps its name, so the search continues with the next one.
        except TimeoutError:
            return connection.number + 1
        except WireError as error:
            self._be_alone(f"{error}")
        except OSError:  # the next relay takes its place
            if not received:
                self._closed.wait(self._retry_seconds)
        finally:
            self._relay_connection = None
            connection.close()
        return 0

    def _be_alone(self, why: str) -> None:
        self._stop_relaying()
        self._meeting = None
        if self._alone is not None:
            self._alone(
                "reads weights from the learner itself instead of another process of this "
                f"host: {why}"
            )

    def _stop_relaying(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    # -- from the learner ------------------------------------------------------------------------

    def _read(self) -> None:
        shared = ClientEnd(self.address, SharedMemoryReader, self._inline, self._memory)
        reader = FrameReader(
            episodes_pb2.WeightsHeader, self._most_bytes, digests=True, lease=shared.lease
        )
        # A stopped learner accepts calls without an answer, for which gRPC has no deadline.
        first, call = FirstAnswer(self._channel), None
        try:
            call = self._subscribe(shared.in_metadata(self._metadata))
            call.initial_metadata()  # waits for it
            first.answered()
            self.answered = True
            for message in call:
                frame = reader.feed(message)
                large = shared.is_large(max(len(message), reader.unfinished_bytes))
                if large and not self._large:
                    self._large = True
                    self._meet()
                memory = shared.take_frozen()
                if frame is not None:
                    # Before any thread of this process acts and holds the interpreter.
                    relay = self._relay
                    if relay is not None and (why := relay.offer(frame, message, memory)):
                        self._be_alone(why)
                    self._take(frame)
                del frame, memory
                if self._relay_connection is not None:
                    return
                shared.receive_offers()
        except grpc.RpcError as error:
            self._error = str(error.details() if hasattr(error, "details") else error)
        # A new stream begins with a whole version.
        except WireError as error:
            self._error = f"bad weights: {error}"
        except ValueError:  # raised by a closed channel
            if not first.why_not:
                raise
        finally:
            first.answered()
            if call is not None:
                call.cancel()
                # A broken call is its own error, and the traceback would keep it and this frame.
                call = None
            shared.close()
        if why := first.why_not:
            self._error = why
            self._channel = self._dial()
            if self._closed.is_set():  # `close` may have closed the former one
                self._channel.close()
        self._closed.wait(self._retry_seconds)

    def _subscribe(self, metadata: CallMetadata) -> Any:
        """Begin a call to the learner."""
        subscribe: grpc.UnaryStreamMultiCallable[episodes_pb2.Subscription, bytes]
        subscribe = self._channel.unary_stream(
            SUBSCRIBE_METHOD,
            request_serializer=episodes_pb2.Subscription.SerializeToString,
            response_deserializer=None,
        )
        request = episodes_pb2.Subscription(module_id=self._module_id, subscriber=self._subscriber)
        return subscribe(request, metadata=metadata, wait_for_ready=True)

    def _take(self, frame: WeightsFrame) -> None:
        weights = Weights(Version.of(frame.header.version), frame.tree)
        with self._condition:
            # A learner that restarted may offer older weights; they are not used.
            if self._newest is None or weights.version > self._newest.version:
                self._newest = weights
                self._condition.notify_all()


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
        self._failed = False

    def chunks(self, writer: SharedMemoryWriter | None) -> Iterator[bytes]:
        """Yield all chunks: in shared memory if possible, otherwise inline.

        Args:
            writer: of the subscriber; None: no shared memory.
        """
        frozen = None if writer is None else self._frozen_frame(writer)
        slot = None if frozen is None or writer is None else writer.lend(frozen.memory)
        return self._inline() if frozen is None or slot is None else iter((frozen.chunk(slot),))

    def _frozen_frame(self, writer: SharedMemoryWriter) -> FrozenFrame | None:
        with self._lock:
            if self._whole is not None:
                whole, self._whole = self._whole, None
                least = least_bytes()
                if least is not None and lay_out(whole[1])[0].size >= least:
                    try:
                        self._frozen = FrozenFrame(*whole)
                    except OSError:  # too little memory
                        self._failed = True
            if self._failed:
                writer.close()  # the reader warns
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
        # Its metadata has the token with which the subscriber will connect for shared memory.
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
