"""Communication between the learners of a group on several hosts, encrypted and authenticated.

torch.distributed cannot do that: gloo can be built with TLS, but what is published is not, and NCCL
has none. So each learner sends to the next one, and the last to the first, over a stream like those
of EnvRunners: to the address at which they dial it, with the run's certificates and its token.

A sum goes around the ring twice (Patarasuk and Yuan, 2009). The vector has as many parts as there
are learners. In the first round each part is added up on its way, and ends, complete, at one
learner; in the second everybody gets it from there. So all have the same bits, and each sends twice
the vector at most, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event

import grpc
import torch
from torch import Tensor

from juggler.learner.group.peers import COLLECTIVE_SECONDS, PeerLost, Peers
from juggler.learner.group.ring_server import RING_METADATA, RING_METHOD, RingServer
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import EndpointError, dial, wait_until_ready
from juggler.runtime.actors.tls import Tls

PIECE_BYTES = 1 << 20  # of a message: the next learner adds one while another is on its way
_END_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RingAccess:
    """How a learner reaches others, and they it.

    Attributes:
        server: takes their streams.
        address: at which they dial it.
        metadata: of its calls.
        tls: of this host.
    """

    server: RingServer
    address: str
    metadata: CallMetadata
    tls: Tls | None


class RingPeers(Peers):
    """Peers of which each sends to the next one.

    Args:
        access: how this learner reaches the next one.
        group: names the group and its generation, in the same words at all of them.
        rank: of this learner.
        addresses: of all, by rank.
        superseded: says whether the driver has asked for another group by now.

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
        self._inbox = access.server.expect(self._before)
        self._unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self._call: grpc.Call | None = None  # to the next learner
        self._over = Event()  # that call
        address = addresses[(rank + 1) % self.size]
        self._next = f"learner at {address}"
        self._channel = dial(address, access.tls)
        try:
            wait_until_ready(self._channel, address, "learner", COLLECTIVE_SECONDS, access.tls)
            self._call = self._opened((*access.metadata, (RING_METADATA, _name(group, rank))))
        except EndpointError as error:
            self.close()
            raise PeerLost(str(error)) from None

    def broadcast(self, data: bytes | None, root: int, size: int) -> bytes:
        whole = torch.empty(size, dtype=torch.uint8)  # [size]
        if data is not None:
            whole.numpy()[:] = memoryview(data)
        for piece in _pieces(whole):
            if self.rank != root:
                piece.copy_(self._received(piece))
            if self.rank != (root - 1) % self.size:
                self._send(piece)
        return whole.numpy().tobytes()

    def close(self) -> None:
        self._unsent.put(None)  # behind what others may still need
        if self._call is not None:
            self._over.wait(_END_SECONDS)
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
                came = self._received(piece)
                if step < self.size - 1:
                    piece.add_(came)
                else:
                    piece.copy_(came)
                if step < steps - 1:
                    self._send(piece)
        return flat.view(x.shape)

    def _send(self, piece: Tensor) -> None:
        self._unsent.put(piece.view(torch.uint8).numpy().tobytes())

    def _received(self, like: Tensor) -> Tensor:
        """The next piece from the learner before this one, of this shape and dtype."""
        message = self._inbox.get(self._why_give_up)
        if len(message) != like.nbytes:
            got = len(message)
            raise PeerLost(f"the learner before this one sent {got} bytes, not {like.nbytes}")
        return torch.frombuffer(bytearray(message), dtype=like.dtype)  # torch wants to own them

    def _why_give_up(self) -> str:
        if self._superseded():
            return "there is another group to form"
        if self._over.is_set() and self._call is not None:
            return f"the {self._next} ended the stream: {self._call.details() or 'it has left'}"
        return ""

    def _opened(self, metadata: CallMetadata) -> grpc.Call:
        ring: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            RING_METHOD
        )
        call = ring(iter(self._unsent.get, None), metadata=metadata)
        if not call.add_callback(self._over.set):
            self._over.set()
        return call


def _name(group: str, sender: int) -> bytes:
    return f"{group}/{sender}".encode()


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Views of a vector, of a message each."""
    return (piece for piece in torch.split(x, PIECE_BYTES // x.itemsize) if piece.numel())
