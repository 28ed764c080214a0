"""Batches from an envrunner to a learner: the stream's two ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.tls import Tls
from juggler.runtime.episodes.unfinished import Unfinished
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import Frame, FrameReader, Limits, encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

PUSH_METHOD = "/juggler.v1.Episodes/Push"
_SERVICE, _METHOD = PUSH_METHOD.strip("/").split("/")

BatchFrame = Frame[episodes_pb2.BatchHeader]


class EpisodeReceiver:
    """The learner's end. Each stream has a thread, in which `take` is called for each batch.

    Args:
        take: says why it refuses a batch, or "" where it took it. Called in any thread. A WireError
            of its ends the stream, too.
        why_refused: says why a call may not open a stream, from its metadata; None lets it in.
        limits: of one batch, held against its header before memory is taken.
    """

    def __init__(
        self,
        take: Callable[[BatchFrame], str],
        why_refused: Callable[[CallMetadata], str | None],
        limits: Limits,
    ) -> None:
        self._take = take
        self._why_refused = why_refused
        self._limits = limits
        self._unfinished = Unfinished()
        self._lock = threading.Lock()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """What reading frames and taking batches has cost so far, over all streams."""
        return self._seconds

    def handler(self) -> grpc.GenericRpcHandler:
        """To add to a server."""
        push: grpc.RpcMethodHandler[bytes, episodes_pb2.Acknowledgement]
        push = grpc.stream_stream_rpc_method_handler(
            self._push,
            request_deserializer=None,  # frames are read by hand
            response_serializer=episodes_pb2.Acknowledgement.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: push})

    def _push(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[episodes_pb2.Acknowledgement]:
        if refusal := self._why_refused(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        reader = FrameReader(episodes_pb2.BatchHeader, self._limits)
        try:
            for message in messages:
                started = time.perf_counter()
                frame = reader.feed(message)
                self._unfinished.hold(context, reader.unfinished_bytes)
                refused, bad = self._taken(frame) if frame is not None else ("", None)
                with self._lock:
                    self._seconds += time.perf_counter() - started
                if frame is not None:
                    yield episodes_pb2.Acknowledgement(
                        batch_id=frame.header.batch_id, refused=refused
                    )
                if bad is not None:
                    raise bad
                del message, frame  # their memory serves for the next one
        except WireError as error:
            # What follows on this stream cannot be trusted either.
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._unfinished.hold(context, 0)

    def _taken(self, frame: BatchFrame) -> tuple[str, WireError | None]:
        """(the reason to refuse it or "", the error that its stream is to end with)."""
        try:
            return self._take(frame), None
        except WireError as error:
            return str(error), error


class EpisodeSender:
    """The envrunner's end: sends batches to one learner and says what became of each.

    The stream opens with the first batch, and again with the next one after it broke. `settled` is
    called once for each batch, in another thread: (batch id, "" or the reason, explanation), where
    the reason is "refused" or "learner_lost".
    """

    def __init__(
        self,
        address: str,
        metadata: CallMetadata,
        settled: Callable[[int, str, str], None],
        tls: Tls | None = None,
    ) -> None:
        self._address = address
        self._metadata = metadata
        self._settled = settled
        self._channel = dial(address, tls)
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._closed = False

    def send(self, header: episodes_pb2.BatchHeader, tree: Tree) -> None:
        """Copies the tree before it returns; never waits for the network."""
        chunks = list(encode_frame(header, tree))
        with self._lock:
            if not self._closed and (self._stream is None or self._stream.broken):
                self._stream = _Stream(self._channel, self._metadata, self._settled)
            stream = None if self._closed else self._stream
        if stream is None:
            self._settled(header.batch_id, "learner_lost", "the stream to the learner is closed")
        else:
            stream.put(header.batch_id, chunks)

    def close(self) -> None:
        """What is not acknowledged by now counts as lost. May be called while another thread
        sends."""
        with self._lock:
            self._closed = True
        if self._stream is not None:
            self._stream.end()
        self._channel.close()


class _Stream:
    """One life of the connection; whatever is unacknowledged when it ends is lost."""

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: CallMetadata,
        settled: Callable[[int, str, str], None],
    ) -> None:
        self._settled = settled
        self._chunks: SimpleQueue[bytes | None] = SimpleQueue()  # None: there are no more
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self.broken = ""  # why, once it is
        push: grpc.StreamStreamMultiCallable[bytes, episodes_pb2.Acknowledgement]
        push = channel.stream_stream(
            PUSH_METHOD,
            request_serializer=None,
            response_deserializer=episodes_pb2.Acknowledgement.FromString,
        )
        self._call = push(self._messages(), metadata=metadata, wait_for_ready=False)
        threading.Thread(target=self._acknowledge, name="episodes-acks", daemon=True).start()

    def put(self, batch_id: int, chunks: list[bytes]) -> None:
        with self._lock:
            reason = self.broken
            if not reason:
                self._open.add(batch_id)
        if reason:
            self._settled(batch_id, "learner_lost", reason)
            return
        for chunk in chunks:
            self._chunks.put(chunk)

    def end(self) -> None:
        self._chunks.put(None)

    def _messages(self) -> Iterator[bytes]:
        while not self.broken and (chunk := self._chunks.get()) is not None:
            yield chunk
            del chunk  # its memory serves for the next one

    def _acknowledge(self) -> None:
        reason = "the learner ended the stream"
        try:
            for ack in self._call:
                with self._lock:
                    known = ack.batch_id in self._open
                    self._open.discard(ack.batch_id)
                if known:
                    self._settled(ack.batch_id, "refused" if ack.refused else "", ack.refused)
        except grpc.RpcError as error:
            reason = str(error.details() if hasattr(error, "details") else error)
        except ValueError:
            reason = "the channel was closed"
        finally:  # whatever happened: nobody would read what is acknowledged from here on
            with self._lock:
                self.broken = reason or "the stream to the learner broke"
                lost, self._open = self._open, set()
            self._chunks.put(None)
            for batch_id in lost:
                self._settled(batch_id, "learner_lost", reason)
