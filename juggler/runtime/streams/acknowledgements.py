"""What the taker of batches answers on a stream of episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import grpc

from juggler.runtime.actors.calls import calls
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import episodes_pb2

_MOST_UNREAD = 4096


class Acknowledgements:
    """Those of one call, in whatever order they are given.

    Attributes:
        stream: the server's end of the call.
    """

    def __init__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self._unread: deque[bytes] = deque()
        self.stream = calls().ServerStream(requests, context, self._next)

    def give(self, batch_id: int, refused: str) -> None:
        """Answer a batch, in any thread.

        Args:
            batch_id: of the batch.
            refused: why it was not taken; "": it was.
        """
        said = episodes_pb2.Acknowledgement(batch_id=batch_id, refused=refused)
        self._unread.append(said.SerializeToString())
        self.stream.wake()

    def must_be_read(self) -> None:
        """
        Raises:
            WireError: the sender goes on without reading any.
        """
        if len(self._unread) > _MOST_UNREAD:
            raise WireError(f"{len(self._unread)} acknowledgements were not read")

    def _next(self) -> bytes | None:
        return self._unread.popleft() if self._unread else None
