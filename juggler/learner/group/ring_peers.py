"""Encrypted, authenticated communication between learners on several hosts.

torch.distributed has no encryption: gloo is published without TLS, and NCCL does not support it. So
each learner sends to the next one, and the last to the first, over a stream like an EnvRunner's,
with the run's certificates and its token.

A sum goes around the ring twice (Patarasuk and Yuan, 2009). The vector is split into one part per
learner. In the first round each part is added up from learner to learner, until one has the
complete part; the second round distributes it. So all have the same bits, and each sends at most
twice the vector, for any number of learners.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue, SimpleQueue

import grpc
import torch
from torch import Tensor

from juggler.learner.group.peers import COLLECTIVE_SECONDS, PeerLost, Peers
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import EndpointError, dial, wait_until_ready
from juggler.runtime.actors.tls import Tls

RING_METHOD = "/juggler.v1.Gradients/Ring"
#: Names the group and the sender: see `RingPeers`.
RING_METADATA = "juggler-ring-bin"
_SERVICE, _METHOD = RING_METHOD.strip("/").split("/")

_MAX_WAITING = 4  # unread messages of a stream
_POLL_SECONDS = 0.05
PIECE_BYTES = 1 << 20  # of a message: the next learner adds one while another is in transit
_END_SECONDS = 1.0


class RingInbox:
    """Messages from the previous learner in the ring."""

    def __init__(self) -> None:
        self.taken = False  # whether a stream feeds it
        self._messages: Queue[bytes] = Queue(_MAX_WAITING)
        self._ended = threading.Event()

    def put(self, message: bytes) -> bool:
        """Add a message once there is room; return False after the end."""
        while not self._ended.is_set():
            with suppress(Full):
                self._messages.put(message, timeout=_POLL_SECONDS)
                return True
        return False

    def end(self) -> None:
        """Accept no more messages."""
        self._ended.set()

    def get(self, why_give_up: Callable[[], str]) -> bytes:
        """Wait for the next message.

        Args:
            why_give_up: called while waiting; returns a reason to give up, or "".

        Raises:
            PeerLost: no message arrived in time.
        """
        deadline = time.monotonic() + COLLECTIVE_SECONDS
        while True:
            has_ended = self._ended.is_set()  # no message follows
            with suppress(Empty):
                return self._messages.get(timeout=0 if has_ended else _POLL_SECONDS)
            why = why_give_up()
            if not why and has_ended:
                why = "the learner before this one has left"
            if not why and time.monotonic() > deadline:
                why = f"nothing arrived within {COLLECTIVE_SECONDS:.0f} s"
            if why:
                raise PeerLost(why)


class RingServer:
    """Serves the ring, at the address that EnvRunners dial.

    Args:
        why_refused: returns from a call's metadata why it may not open a stream; None: it may.
    """

    def __init__(self, why_refused: Callable[[CallMetadata], str | None]) -> None:
        self._why_refused = why_refused
        self._changed = threading.Condition()
        self._inboxes: dict[bytes, RingInbox] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a server."""
        ring: grpc.RpcMethodHandler[bytes, bytes]
        ring = grpc.stream_stream_rpc_method_handler(self._ring)
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: ring})

    def expect(self, name: bytes) -> RingInbox:
        """Accept one stream with this name."""
        with self._changed:
            inbox = self._inboxes[name] = RingInbox()
            self._changed.notify_all()
        return inbox

    def forget(self, name: bytes) -> None:
        """End the stream with this name, and no longer accept it."""
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
        # A call that has already ended never calls back.
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

    def _inbox_of(self, name: object, context: grpc.ServicerContext) -> RingInbox | None:
        """Wait until this learner expects a stream; return its inbox, or None."""
        deadline = time.monotonic() + COLLECTIVE_SECONDS

        def found() -> RingInbox | None:
            return self._inboxes.get(name) if isinstance(name, bytes) else None

        with self._changed:
            while (inbox := found()) is None:
                if time.monotonic() > deadline or not context.is_active():
                    return None
                self._changed.wait(_POLL_SECONDS)
            if inbox.taken:
                return None
            inbox.taken = True
            return inbox


@dataclass(frozen=True, slots=True)
class RingAccess:
    """Addresses and credentials for streams between learners.

    Attributes:
        server: accepts streams of other learners.
        address: address of the server for other learners.
        metadata: metadata of this learner's calls.
        tls: TLS settings of this host.
    """

    server: RingServer
    address: str
    metadata: CallMetadata
    tls: Tls | None


class RingPeers(Peers):
    """Peers in a ring, each of which sends to the next.

    Args:
        access: addresses and credentials.
        group: name of the group and its generation, the same at all learners.
        rank: rank of this learner.
        addresses: addresses of all learners, by rank.
        superseded: returns whether the driver has requested another group.

    Raises:
        PeerLost: the next learner cannot be reached.
    """

    def __init__(
        self,
        access: RingAccess,
        group: str,
        rank: int,
        addresses: Sequence[str],
        superseded: Callable[[], bool],
    ) -> None:
        super().__init__(rank, len(addresses))
        self._superseded = superseded
        self._server = access.server
        self._before = _name(group, (rank - 1) % self.size)
        # Expected before dialling, since the previous learner may be faster.
        self._inbox = access.server.expect(self._before)
        self._unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self._call: grpc.Call | None = None  # to the next learner
        self._call_ended = threading.Event()
        address = addresses[(rank + 1) % self.size]
        self._next = f"learner at {address}"
        self._channel = dial(address, access.tls)
        try:
            wait_until_ready(self._channel, address, "learner", COLLECTIVE_SECONDS, access.tls)
            self._call = self._opened((*access.metadata, (RING_METADATA, _name(group, rank))))
        except EndpointError as error:
            self.close()
            raise PeerLost(str(error)) from None

    def close(self) -> None:
        self._unsent.put(None)  # after messages that others may still need
        if self._call is not None:
            self._call_ended.wait(_END_SECONDS)
        self._server.forget(self._before)
        self._channel.close()

    def _sum_on_host(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1).contiguous()  # [B]
        parts = flat.tensor_split(self.size)  # [B / k] each
        for piece in _pieces(parts[self.rank]):
            self._send(piece)
        steps = 2 * (self.size - 1)
        for step in range(steps):
            for piece in _pieces(parts[(self.rank - step - 1) % self.size]):
                received = self._received(piece)
                if step < self.size - 1:
                    piece.add_(received)
                else:
                    piece.copy_(received)
                if step < steps - 1:
                    self._send(piece)
        return flat.view(x.shape)

    def _send(self, piece: Tensor) -> None:
        self._unsent.put(piece.view(torch.uint8).numpy().tobytes())

    def _received(self, like: Tensor) -> Tensor:
        """Receive the previous learner's next piece, of this size and dtype."""
        message = self._inbox.get(self._why_give_up)
        if len(message) != like.nbytes:
            got = len(message)
            raise PeerLost(f"the learner before this one sent {got} bytes, not {like.nbytes}")
        return torch.frombuffer(bytearray(message), dtype=like.dtype)  # torch needs writable memory

    def _why_give_up(self) -> str:
        if self._superseded():
            return "there is another group to form"
        if self._call_ended.is_set() and self._call is not None:
            return f"the {self._next} ended the stream: {self._call.details() or 'it has left'}"
        return ""

    def _opened(self, metadata: CallMetadata) -> grpc.Call:
        ring: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            RING_METHOD
        )
        call = ring(iter(self._unsent.get, None), metadata=metadata)
        if not call.add_callback(self._call_ended.set):
            self._call_ended.set()
        return call


def _name(group: str, sender: int) -> bytes:
    return f"{group}/{sender}".encode()


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Split a vector into views, one per message."""
    return (piece for piece in torch.split(x, PIECE_BYTES // x.itemsize) if piece.numel())
