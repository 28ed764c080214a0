"""A learner's end of the episodes' stream on a Unix socket."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from juggler.runtime.actors.credentials import CallMetadata, call_metadata, why_refused
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind
from juggler.runtime.streams.episodes import BatchFrame, EpisodeReceiver, EpisodeSender
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.wire.layouts import MOST_PAYLOAD_BYTES
from juggler.runtime.wire.v1 import episodes_pb2

PATIENCE = 60.0  # seconds until a test fails; nothing takes as long


def header(batch_id: int) -> episodes_pb2.BatchHeader:
    return episodes_pb2.BatchHeader(batch_id=batch_id, envrunner="envrunner-0", generation=1)


def tree(batch_id: int, size: int = 4) -> dict[str, Any]:
    """A tree that only this batch has."""
    values = np.arange(size, dtype=np.float32) + batch_id  # [size]
    return {"default": {"observations": values, "id": np.array(batch_id)}}


class LearnerEnd:
    """Listens on a path with shared memory; may stop and restart.

    Attributes:
        taken: the frames, in the order in which they came.
        answer: what `take` says to a frame; nothing else comes as long as it waits.
    """

    def __init__(
        self, directory: Path, most_bytes: int = MOST_PAYLOAD_BYTES, shared: str = ""
    ) -> None:
        """`shared` is the address of a socket in the shared directory."""
        self.address = f"unix:{directory / 'l'}"
        self.taken: list[BatchFrame] = []
        self.answer: Callable[[BatchFrame], str] = lambda frame: ""
        self._most_bytes = most_bytes
        self._sockets = [self.address, shared] if shared else [self.address]
        self._opened = 0
        self.start()

    @property
    def opened(self) -> int:
        """Streams that were let in or refused so far."""
        return self._opened

    def start(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=8)
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        self.memory = MemorySocket(*self._sockets)
        receiver = EpisodeReceiver(self._take, self._why_refused, self.memory, self._most_bytes)
        self._server.add_generic_rpc_handlers((receiver.handler(),))
        bind(self._server, self.address)
        self.tcp_address = bind(self._server, "127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        """As if the process were killed: streams break at once."""
        self.begin_to_stop()
        assert self._server.stop(grace=None).wait(PATIENCE)
        self._threads.shutdown(wait=False)
        self.memory.close()

    def begin_to_stop(self) -> None:
        """Streams break, even where `answer` waits."""
        self._server.stop(grace=0)

    def _take(self, frame: BatchFrame) -> str:
        self.taken.append(frame)
        return self.answer(frame)

    def _why_refused(self, metadata: CallMetadata) -> str | None:
        self._opened += 1
        return why_refused(metadata, token="secret", run_id="run")


class Senders:
    """Senders, and what became of their batches."""

    def __init__(self) -> None:
        self.settled: list[tuple[int, str, str]] = []  # over all senders
        self.inline: list[str] = []  # why senders share no memory
        self._changed = threading.Condition()
        self._senders: list[EpisodeSender] = []

    def open(
        self, address: str, token: str = "secret", run_id: str = "run", **more: Any
    ) -> EpisodeSender:
        metadata = call_metadata(token, run_id, "incarnation")
        sender = EpisodeSender(address, metadata, self._settled, inline=self.inline.append, **more)
        self._senders.append(sender)
        return sender

    def wait_for(self, *batch_ids: int) -> dict[int, tuple[str, str]]:
        """Fates of these batches, once all are settled: reason and explanation."""
        wanted = set(batch_ids)
        with self._changed:
            came = self._changed.wait_for(lambda: not wanted - self._ids(), PATIENCE)
            assert came, f"not settled: {wanted - self._ids()}"
            return {s[0]: s[1:] for s in self.settled if s[0] in wanted}

    def send_until_one_arrives(self, sender: EpisodeSender, first_id: int) -> int:
        """Send until one batch arrives; return its id.

        A broken stream is found when its end is reported; a batch that comes before
        that is lost too. So are batches that come while the channel waits before it dials again.
        """
        deadline = time.monotonic() + PATIENCE
        for batch_id in count(first_id):
            sender.send(header(batch_id), tree(batch_id))
            reason, _ = self.wait_for(batch_id)[batch_id]
            if not reason:
                return batch_id
            assert reason == "learner_lost"
            assert time.monotonic() < deadline, "no batch arrives any more"
        raise AssertionError

    def _ids(self) -> set[int]:
        return {batch_id for batch_id, _, _ in self.settled}

    def settled_more_than_once(self) -> list[int]:
        return [batch_id for batch_id, n in Counter(s[0] for s in self.settled).items() if n > 1]

    def close(self) -> None:
        for sender in self._senders:
            sender.close()

    def _settled(self, batch_id: int, reason: str, explanation: str) -> None:
        with self._changed:
            self.settled.append((batch_id, reason, explanation))
            self._changed.notify_all()
