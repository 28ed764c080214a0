"""Streams of batches from an EnvRunner to a learner."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import grpc

from juggler.runtime.actors.calls import CallEnd, ClientStream
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.tls import Tls
from juggler.runtime.streams.memory_socket import ClientEnd, MemorySocket, ServerEnd
from juggler.runtime.streams.shared_memory import SharedMemoryReader, SharedMemoryWriter
from juggler.runtime.wire.chunks import Piece
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import Frame, FrameReader, encode_frame
from juggler.runtime.wire.layouts import MOST_PAYLOAD_BYTES
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

PUSH_METHOD = "/juggler.v1.Episodes/Push"
_SERVICE, _METHOD = PUSH_METHOD.strip("/").split("/")

BatchFrame = Frame[episodes_pb2.BatchHeader]


class EpisodeReceiver:
    """The learner's end of the stream.

    Args:
        take: returns why it refuses a batch, or "". Called by one thread at a time; it must not
            wait. If it raises a WireError, the stream also ends.
        why_refused: returns why a call may not open a stream, given its metadata; None admits it.
        memory: address at which local EnvRunners share memory; None: impossible.
        most_bytes: of one batch, compared with its header before memory is allocated.

    Attributes:
        seconds: spent on frames and batches so far.
    """

    def __init__(
        self,
        take: Callable[[BatchFrame], str],
        why_refused: Callable[[CallMetadata], str | None],
        memory: MemorySocket | None = None,
        most_bytes: int = MOST_PAYLOAD_BYTES,
    ) -> None:
        self._take = take
        self._why_refused = why_refused
        self._most_bytes = most_bytes
        self._memory = memory
        self._taking = threading.Lock()
        self.seconds = 0.0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server."""
        method: grpc.RpcMethodHandler[bytes, bytes]
        method = grpc.stream_stream_rpc_method_handler(self._push)
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if refusal := self._why_refused(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        with closing(ServerEnd(self._memory, context, SharedMemoryReader)) as shared:
            context.send_initial_metadata(())  # at once: the EnvRunner waits for it
            reader = FrameReader(episodes_pb2.BatchHeader, self._most_bytes, lease=shared.lease)
            try:
                for message in requests:
                    answer, bad = self._received(message, reader, shared)
                    del message  # a batch may be a view of it
                    if answer is not None:
                        yield answer.SerializeToString()
                    if bad is not None:
                        raise bad
            except WireError as error:
                # The rest of this stream cannot be trusted either.
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except grpc.RpcError:
                return  # the EnvRunner is gone

    def _received(
        self,
        message: bytes,
        reader: FrameReader[episodes_pb2.BatchHeader],
        shared: ServerEnd[SharedMemoryReader],
    ) -> tuple[episodes_pb2.Acknowledgement | None, WireError | None]:
        """Return the answer to a complete batch, and the stream's fatal error."""
        started = time.perf_counter()
        if shared.end is not None and not shared.end.answered:
            shared.end.receive_offers()
        frame = reader.feed(message)
        read = time.perf_counter()
        if frame is None:
            self.seconds += read - started
            return None, None
        # The streams of all EnvRunners share one store, which has no lock.
        refused, bad = "", None
        with self._taking:
            taking = time.perf_counter()
            try:
                refused = self._take(frame)
            except WireError as error:
                refused, bad = str(error), error
            self.seconds += read - started + time.perf_counter() - taking
        batch_id = frame.header.batch_id
        return episodes_pb2.Acknowledgement(batch_id=batch_id, refused=refused), bad


class EpisodeSender:
    """Sends batches of an EnvRunner to one learner.

    It reports the outcome of each batch.

    The stream opens with the first batch, and after a break with the next one. `settled` is called
    once for each batch, in another thread: (batch id, "" or the reason, explanation); the reason
    is "refused" or "learner_lost".

    Over a Unix socket, or with the learner's address in the shared directory as `memory`, large
    batches use shared memory once the learner has mapped it. Otherwise `inline` is called with the
    reason, for people.

    `ended` is called with the end of each stream, after its lost batches are settled. If the
    learner has not answered, the next stream uses a new channel.
    """

    def __init__(
        self,
        address: str,
        metadata: CallMetadata,
        settled: Callable[[int, str, str], None],
        tls: Tls | None = None,
        inline: Callable[[str], None] | None = None,
        ended: Callable[[CallEnd], None] = lambda _: None,
        memory: str = "",
    ) -> None:
        self._address = address
        self._memory = memory
        self._metadata = metadata
        self._settled = settled
        self._inline = inline
        self._ended = ended
        self._tls = tls
        self._channel = dial(address, tls)
        self._lock = threading.Lock()
        self._stream: _EpisodeStream | None = None
        self._closed = False

    def send(self, header: episodes_pb2.BatchHeader, tree: Tree) -> None:
        """Send a batch, without waiting for the network.

        The tree's arrays must not change any more: unless they are copied into shared memory here,
        they are read after earlier batches have left.

        Raises:
            WireError: the tree has a value that cannot be sent.
        """
        with self._lock:
            if not self._closed and (self._stream is None or self._stream.broken):
                if self._stream is not None and self._stream.unanswered:
                    self._channel = dial(self._address, self._tls)
                shared = ClientEnd(self._address, SharedMemoryWriter, self._inline, self._memory)
                self._stream = _EpisodeStream(
                    self._channel, self._metadata, self._settled, shared, self._ended
                )
            stream = None if self._closed else self._stream
        place = None if stream is None else stream.place
        chunks = encode_frame(header, tree, place=place)
        if stream is None:
            self._settled(header.batch_id, "learner_lost", "the stream to the learner is closed")
        else:
            stream.put(header.batch_id, chunks)

    def close(self) -> None:
        """Count batches without an acknowledgement as lost.

        May be called while another thread sends.
        """
        with self._lock:
            self._closed = True
        self._channel.close()


class _EpisodeStream:
    """One life of the connection."""

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: CallMetadata,
        settled: Callable[[int, str, str], None],
        shared: ClientEnd[SharedMemoryWriter],
        on_end: Callable[[CallEnd], None],
    ) -> None:
        self._settled = settled
        self._shared = shared
        self._on_end = on_end
        self._unsent: deque[Iterator[bytes]] = deque()  # the chunks of each batch
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self.broken = ""  # the reason, once broken
        self.unanswered = False  # whether it broke because the learner did not answer
        # Last, because its threads call the methods below at once.
        self._stream = ClientStream(
            channel,
            PUSH_METHOD,
            shared.in_metadata(metadata),
            self._next_chunk,
            self._acknowledged,
            self._ended,
            name="episodes-acks",
            must_answer=True,
        )

    def place(self, pieces: Sequence[Piece], size: int) -> int | None:
        """Put a large payload into shared memory.

        Returns its slot; None: it is sent inline.
        """
        if not self._shared.is_large(size) or (writer := self._shared.end) is None:
            return None
        slot = writer.place(pieces, size)
        if slot is None and writer.why_not:
            self._shared.give_up(writer.why_not)
        return slot

    def put(self, batch_id: int, chunks: Iterator[bytes]) -> None:
        with self._lock:
            reason = self.broken
            if not reason:
                self._open.add(batch_id)
                self._unsent.append(chunks)
        if reason:
            self._settled(batch_id, "learner_lost", reason)
        else:
            self._stream.wake()

    def _next_chunk(self) -> bytes | None:
        while self._unsent:
            chunk = next(self._unsent[0], None)
            if chunk is not None:
                return chunk
            self._unsent.popleft()
        return None

    def _acknowledged(self, message: bytes) -> None:
        self._shared.receive_offers()
        answer = episodes_pb2.Acknowledgement.FromString(message)
        with self._lock:
            known = answer.batch_id in self._open
            self._open.discard(answer.batch_id)
        if known:
            self._settled(answer.batch_id, "refused" if answer.refused else "", answer.refused)

    def _ended(self, end: CallEnd) -> None:
        end = end._replace(why=end.why or "the learner ended the stream")
        with self._lock:
            self.unanswered = end.unanswered
            self.broken = end.why
            lost, self._open = self._open, set()
            self._unsent.clear()
        self._shared.close()
        for batch_id in lost:
            self._settled(batch_id, "learner_lost", end.why)
        self._on_end(end)
