"""Peers that share memory with a learner, by hand; and what this process holds of it."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.streams.episodes import PUSH_METHOD, EpisodeSender
from juggler.runtime.streams.memory_sockets import (
    MEMORY_METADATA,
    connect,
    memory_path,
    new_token,
)
from juggler.runtime.streams.shared_memory import Memory
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import episodes_pb2
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree

SIZE = 40_000  # elements of float32
FURTHER = count(1_000_000)  # batch ids
PROBE = 0xFFFFFFFF
PROOF = b"sixteen bytes ok"


def mapped() -> set[str]:
    """The shared memories that this process has mapped, by their inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:juggler" in line}


def open_memories() -> int:
    """How many of this process's open files are shared memory."""
    return sum("memfd:juggler" in where for where in _links())


def open_files() -> int:
    return len(list(_links()))


def _links() -> Iterable[str]:
    for each in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{each}")
        except OSError:
            continue


def soon(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not so: {what}"
        time.sleep(0.01)


def send_each(senders: Senders, sender: EpisodeSender, *batch_ids: int, size: int = SIZE) -> None:
    """Send one batch after the other."""
    for batch_id in batch_ids:
        sender.send(header(batch_id), tree(batch_id, size))
        assert senders.wait_for(batch_id)[batch_id] == ("", "")


def begin_to_share(learner: LearnerEnd, senders: Senders) -> EpisodeSender:
    """A sender that has begun to share memory."""
    sender = senders.open(learner.address)
    before = mapped()

    def lies_in_memory() -> bool:
        send_each(senders, sender, next(FURTHER))
        return mapped() > before

    soon(lies_in_memory, "a batch lies in shared memory")
    learner.taken.clear()
    return sender


class Peer:
    """A writer that does by hand what a test says.

    Attributes:
        connection: with the learner, over which memory is shared.
    """

    def __init__(self, address: str) -> None:
        token = new_token()
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = dial(address)
        metadata = (*call_metadata("secret", "run", "peer"), (MEMORY_METADATA, token))
        push = self._channel.stream_stream(PUSH_METHOD)
        self._call: Any = push(iter(self._messages.get, None), metadata=metadata, timeout=PATIENCE)
        self._next_id = 9000
        assert self.inline() == ""
        self.connection = connect(memory_path(address), token)
        self.connection.settimeout(PATIENCE)

    def offer(self, memory: int, slot: int, size: int) -> None:
        socket.send_fds(self.connection, [struct.pack("<IQ", slot, size)], [memory])

    def prove(self) -> None:
        """Offer an honest probe, and have it answered."""
        probe = Memory(4096)
        probe.fill([memoryview(PROOF)])
        probe.hand_over(self.connection, PROBE)
        # The learner hears of the connection in one thread, and of batches in another.
        soon(lambda: self.inline() == "" and self._has_answer(), "the probe is answered")
        assert self.connection.recv(64) == PROOF

    def _has_answer(self) -> bool:
        return bool(select.select([self.connection], [], [], 0)[0])

    def inline(self) -> str:
        """What the learner says to an honest batch without shared memory."""
        self._next_id += 1
        return self._say(next(encode_frame(header(self._next_id), tree(self._next_id))))

    def shared(self, slot: int, content: Any = None) -> str:
        """What the learner says to a batch in a slot."""
        self._next_id += 1
        content = tree(self._next_id) if content is None else content
        chunks = encode_frame(header(self._next_id), content, place=lambda pieces, size: slot)
        return self._say(next(chunks))

    def _say(self, message: bytes) -> str:
        self._messages.put(message)
        try:
            said = episodes_pb2.Acknowledgement.FromString(next(self._call))
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        assert said.batch_id == self._next_id
        return said.refused

    def close(self) -> None:
        self._messages.put(None)
        self.connection.close()
        self._channel.close()
