"""The learner's end of the streams on which others send it what they sum up together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from juggler.learner.group.peer_lost import PeerLost
from juggler.learner.group.peers import COLLECTIVE_SECONDS
from juggler.runtime.actors.credentials import CallMetadata

RING_METHOD = "/juggler.v1.Gradients/Ring"
#: Names the group and the sender: see `RingPeers`.
RING_METADATA = "juggler-ring-bin"
_SERVICE, _METHOD = RING_METHOD.strip("/").split("/")

_MOST_WAITING = 4  # messages of a stream that nobody has taken yet
_LOOK_SECONDS = 0.05


class Inbox:
    """What came from the learner before this one in its ring."""

    def __init__(self) -> None:
        self.taken = False  # by a stream
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._ended = False

    def put(self, message: bytes) -> bool:
        """Add a message once there is room. False: it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._messages) < _MOST_WAITING)
            if not self._ended:
                self._messages.append(message)
                self._changed.notify_all()
            return not self._ended

    def end(self) -> None:
        """Nothing comes any more, and nothing is taken."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def get(self, why_give_up: Callable[[], str]) -> bytes:
        """The next message.

        Args:
            why_give_up: asked while nothing comes; gives up where this says something.

        Raises:
            PeerLost: none came in time.
        """
        deadline = time.monotonic() + COLLECTIVE_SECONDS
        with self._changed:
            while not self._messages:
                why = why_give_up()
                if not why and self._ended:
                    why = "the learner before this one has left"
                if not why and time.monotonic() > deadline:
                    why = f"nothing came within {COLLECTIVE_SECONDS:.0f} s"
                if why:
                    raise PeerLost(why)
                self._changed.wait(_LOOK_SECONDS)
            self._changed.notify_all()
            return self._messages.popleft()


class RingServer:
    """Serves beside what EnvRunners dial, at the same address.

    Args:
        why_refused: returns why a call may not open a stream, given its metadata; None lets it in.
    """

    def __init__(self, why_refused: Callable[[CallMetadata], str | None]) -> None:
        self._why_refused = why_refused
        self._changed = threading.Condition()
        self._inboxes: dict[bytes, Inbox] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """To add to a server."""
        ring: grpc.RpcMethodHandler[bytes, bytes]
        ring = grpc.stream_stream_rpc_method_handler(self._ring)
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: ring})

    def expect(self, name: bytes) -> Inbox:
        """Take one stream of this name."""
        with self._changed:
            inbox = self._inboxes[name] = Inbox()
            self._changed.notify_all()
        return inbox

    def forget(self, name: bytes) -> None:
        """End that stream, and take it no more."""
        with self._changed:
            inbox = self._inboxes.pop(name, None)
        if inbox is not None:
            inbox.end()

    def _ring(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata: CallMetadata = context.invocation_metadata()
        if refusal := self._why_refused(metadata):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        inbox = self._inbox_of(dict(metadata).get(RING_METADATA, b""), context)
        if inbox is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "it does not form this group")
        if not context.add_callback(inbox.end):
            inbox.end()
        try:
            for message in requests:
                if not inbox.put(message):
                    break
        except grpc.RpcError:
            pass  # the other learner is gone
        finally:
            inbox.end()
        yield from ()

    def _inbox_of(self, name: object, context: grpc.ServicerContext) -> Inbox | None:
        """Where a stream goes, once this learner has heard of its group too; None: nowhere."""
        deadline = time.monotonic() + COLLECTIVE_SECONDS

        def found() -> Inbox | None:
            return self._inboxes.get(name) if isinstance(name, bytes) else None

        with self._changed:
            while (inbox := found()) is None:
                if time.monotonic() > deadline or not context.is_active():
                    return None
                self._changed.wait(_LOOK_SECONDS)
            if inbox.taken:
                return None
            inbox.taken = True
            return inbox
