"""Batches over a network to a learner of this host: what a receiver process does with them.

An EnvRunner's stream ends here. What comes is checked, and goes on to the learner as from an
EnvRunner of its own host, so that large batches reach it through shared memory. The learner's
answer is the answer to the EnvRunner, and where it ends a stream, the EnvRunner's ends too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.public_calls import End
from juggler.runtime.streams.acknowledgements import Acknowledgements
from juggler.runtime.streams.episodes import BatchFrame, EpisodeSender, episodes_handler
from juggler.runtime.streams.unfinished import Unfinished
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import episodes_pb2


class EpisodeRelay:
    """The receiver's end of all streams.

    Args:
        learner: the learner's address on this host, "unix:path".
        metadata: what a stream to the learner shows.
        why_refused: returns why a call may not open a stream, given its metadata; None lets it in.
        limits: of one batch, compared with its header before memory is taken.
        check: raises a WireError if a header is not acceptable, before memory is taken.
        most_bytes: of all batches; half of it for those that the learner has not answered, and half
            for unfinished ones.
        inline: called with the reason, for people, if no memory is shared with the learner.
    """

    def __init__(
        self,
        learner: str,
        metadata: CallMetadata,
        why_refused: Callable[[CallMetadata], str | None],
        limits: Limits,
        check: Callable[[episodes_pb2.BatchHeader], None],
        most_bytes: int,
        inline: Callable[[str], None] | None = None,
    ) -> None:
        self.learner = learner
        self.metadata = metadata
        self.limits = limits
        self.check = check
        self.inline = inline
        self.unfinished = Unfinished(most_bytes // 2)
        self._why_refused = why_refused
        self._most_waiting = most_bytes // 2
        self._lock = threading.Lock()
        self._held = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """To add to a server."""
        return episodes_handler(self._push)

    def hold(self, size: int) -> None:
        """Note that a batch of so many bytes waits for the learner's answer.

        Raises:
            WireError: all that wait hold too much.
        """
        with self._lock:
            if self._held + size > self._most_waiting:
                raise WireError(f"{self._held} bytes of batches wait for the learner already")
            self._held += size

    def let_go(self, size: int) -> None:
        with self._lock:
            self._held -= size

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if refusal := self._why_refused(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        yield from _RelayedStream(self, requests, context).run()


class _RelayedStream:
    """The stream of one EnvRunner, and the one on which its batches go on."""

    def __init__(
        self, relay: EpisodeRelay, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self._relay = relay
        self._context = context
        self._reader = FrameReader(episodes_pb2.BatchHeader, relay.limits, check=relay.check)
        self._answers = Acknowledgements(requests, context)
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # bytes, by the ids of batches without an answer
        self._end: End | None = None  # of the stream to the learner, if that ended first
        self._over = False
        self._sender = EpisodeSender(
            relay.learner, relay.metadata, self._settled, inline=relay.inline, ended=self._ended
        )

    def run(self) -> Iterator[bytes]:
        try:
            yield from self._answers.stream.listen(self._received)
        except WireError as error:
            # What follows on this stream cannot be trusted either.
            self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._relay.unfinished.hold(self._context, 0)
            self._over = True
            self._sender.close()
        if self._end is None:
            return
        if self._end.code is grpc.StatusCode.INVALID_ARGUMENT:
            # The fault is the EnvRunner's, which this status tells: the learner is not lost.
            self._context.abort(self._end.code, f"the learner refused a batch: {self._end.why}")
        why = f"its receiver lost the learner: {self._end.why}"
        self._context.abort(grpc.StatusCode.UNAVAILABLE, why)

    def _received(self, message: bytes) -> None:
        frame = self._reader.feed(message)
        self._relay.unfinished.hold(self._context, self._reader.unfinished_bytes)
        if frame is None:
            return
        self._answers.must_be_read()
        self._hold(frame)
        self._sender.send(frame.header, frame.tree)

    def _hold(self, frame: BatchFrame) -> None:
        batch_id, size = frame.header.batch_id, sum(each.nbytes for _, each in flatten(frame.tree))
        with self._lock:
            if batch_id in self._open:
                raise WireError(f"batch {batch_id} came before")
            self._relay.hold(size)
            self._open[batch_id] = size

    def _settled(self, batch_id: int, reason: str, explanation: str) -> None:
        with self._lock:
            size = self._open.pop(batch_id)
        self._relay.let_go(size)
        if reason != "learner_lost":  # else `_ended` follows
            self._answers.give(batch_id, explanation)

    def _ended(self, end: End) -> None:
        """End the EnvRunner's stream, as the one to the learner did."""
        if not self._over:
            self._end = end
            self._answers.stream.close()
