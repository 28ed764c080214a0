"""Relays a learner's weights once to each host.

One reader of a host relays the learner's weights to the other readers.

The readers of one learner's weights on one host meet at a Unix socket, whose name is derived from
a shared secret, in the directory that containers share, or else at an abstract name. The first to
bind it *relays*: only it reads from the learner. When its process ends, the name is free, and
another reader takes its place at once. A relay that hangs keeps its name; a reader without an
answer tries the next of a few names.

Messages on a connection:

    reader → relay   "?" for a version that it has not had, again when none comes
    relay → reader   for a "?" the version, as a chunk with the descriptor of the frozen memory in
                     which its payload lies; for a second one "there is none"
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import mmap
import socket
import threading
import time
from contextlib import suppress

import numpy as np

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.streams.memory_socket import MemorySocket, connect, memory_path
from juggler.runtime.streams.shared_directory import abstract_address, shared_address
from juggler.runtime.streams.shared_memory import (
    OFFER,
    FrozenFrame,
    SharedMemory,
    receive,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import Frame
from juggler.runtime.wire.v1 import episodes_pb2

WeightsFrame = Frame[episodes_pb2.WeightsHeader]

#: Interval of a reader's requests, and the number of unanswered ones after which a relay counts as
#: hung.
ASK_SECONDS, MOST_ASKED = 1.0, 3

_NAMES = 3  # names that are tried in turn: a relay that hangs keeps its name
_TRIES, _TRY_SECONDS = 20, 0.02  # to connect to a process that has a name but does not listen yet
_MOST_CHUNK_BYTES = 128 << 10  # the kernel accepts some 200 KiB on this socket
_ASK, _NOTHING = b"?", b"-"


class Meeting:
    """Meeting place of one host's readers.

    Args:
        secret: texts that only the readers know.
    """

    def __init__(self, *secret: str) -> None:
        self._key = hashlib.sha256("\0".join(secret).encode()).digest()
        self.token = self._derived("token")

    def address(self, number: int) -> str:
        """Return the address of a name, by its number."""
        name = self._derived(f"name {number}")
        with suppress(EndpointError):  # the streams to learners report it
            if shared := shared_address(name):
                return shared
        return abstract_address(name)

    def _derived(self, what: str) -> str:
        return hmac.new(self._key, what.encode(), "sha256").hexdigest()[:32]

    def find(self, may_relay: bool, first: int = 0) -> RelayConnection | WeightsRelay | None:
        """Find the relaying reader, or become it.

        Args:
            may_relay: whether to relay if no other reader does.
            first: the first name to try.

        Returns:
            The connection to the process that relays; the relay, if it is this process; None:
            no reader relays.

        Raises:
            OSError: other processes have all the names and do not answer.
        """
        why: OSError | None = None
        for number in range(first, _NAMES):
            try:
                return self._find_at(number, may_relay)
            except OSError as error:
                why = error
        raise why or TimeoutError("all processes that relay weights hang")

    def _find_at(self, number: int, may_relay: bool) -> RelayConnection | WeightsRelay | None:
        for _ in range(_TRIES):
            address = self.address(number)
            # Between these two, another reader may be faster, or the relay may leave.
            try:
                found = connect(memory_path(address), self.token, MOST_ASKED * ASK_SECONDS)
                return RelayConnection(found, number)
            except (ConnectionRefusedError, FileNotFoundError):  # there is no listener
                if not may_relay:
                    return None
                try:
                    return WeightsRelay(self, address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # another reader was faster
                        raise
            except ConnectionError:
                pass
            time.sleep(_TRY_SECONDS)  # another reader was faster, or is leaving
        raise TimeoutError("another process has the name, but does not listen")


class _RelayedVersion:
    """A version of weights to relay.

    Args:
        frame: the version, as received.
        chunk: the chunk with the version.
        memory: the memory that the chunk names; None: it came inline, and is copied into new
            memory if there is a reader.
    """

    def __init__(self, frame: WeightsFrame, chunk: bytes, memory: SharedMemory | None) -> None:
        self._frame = frame if memory is None else None
        self._chunk, self._memory = chunk, memory

    def send_to(self, connection: socket.socket) -> None:
        """Send the version to a reader.

        Raises:
            CannotRelay: this process cannot relay it.
            OSError: the reader is gone, or does not read.
        """
        if self._frame is not None:
            try:
                frozen = FrozenFrame(self._frame.header, self._frame.tree)
            except OSError as error:
                raise CannotRelay(f"{error.strerror} for a version of weights") from error
            self._chunk, self._memory, self._frame = frozen.chunk(0), frozen.memory, None
        if len(self._chunk) > _MOST_CHUNK_BYTES:
            raise CannotRelay("the weights have too many arrays to be relayed")
        assert self._memory is not None
        self._memory.hand_over(connection, 0, self._chunk)


class CannotRelay(Exception):
    """This process cannot relay weights; the message has the reason."""


class WeightsRelay:
    """The end of the relaying process.

    A reader gets the newest version when it asks, and only then.
    """

    def __init__(self, meeting: Meeting, address: str) -> None:
        """Raise OSError if the address is taken or cannot be used."""
        self._why_not = ""
        self._lock = threading.Lock()
        self._newest: _RelayedVersion | None = None
        self._had: dict[socket.socket, _RelayedVersion | None] = {}  # by reader
        self._waiting: set[socket.socket] = set()  # readers that have asked for the next version
        self._socket = MemorySocket(address)
        self._socket.expect(meeting.token, self._add_reader)

    def offer(self, frame: WeightsFrame, chunk: bytes, memory: SharedMemory | None) -> str:
        """Relay the newest version.

        Args:
            frame: the version, as received.
            chunk: the chunk with the version.
            memory: the frozen memory that the chunk names; None: it came inline.

        Returns:
            Why this process cannot relay weights, for people; "": it can.
        """
        with self._lock:
            self._newest = _RelayedVersion(frame, chunk, memory)
            for reader in [] if self._why_not else list(self._waiting):
                self._send_newest(reader)
            return self._why_not

    def close(self) -> None:
        self._socket.close()
        with self._lock:
            self._newest = None
            self._had.clear()

    def _add_reader(self, reader: socket.socket) -> None:
        with self._lock:
            self._had[reader] = None
            self._socket.watch(reader, self._receive)

    def _receive(self, reader: socket.socket) -> None:
        with self._lock:
            if reader not in self._had:
                return
            try:
                if reader.recv(1) != _ASK:
                    self._drop(reader)
                elif self._newest is not self._had[reader]:
                    self._send_newest(reader)
                # A reader that asks twice finds out whether this process hangs.
                elif reader in self._waiting:
                    self._waiting.remove(reader)
                    reader.send(_NOTHING)
                else:
                    self._waiting.add(reader)
            except OSError:
                self._drop(reader)
        if self._why_not:  # at once, so that no reader waits in vain
            self._socket.close()

    def _send_newest(self, reader: socket.socket) -> None:
        assert self._newest is not None
        self._had[reader] = self._newest
        self._waiting.discard(reader)
        try:
            self._newest.send_to(reader)
        except CannotRelay as error:
            self._why_not = str(error)
            self._drop(reader)
        except OSError:  # it is gone, or does not read; it may come back
            self._drop(reader)

    def _drop(self, reader: socket.socket) -> None:
        del self._had[reader]
        self._waiting.discard(reader)
        self._socket.drop(reader)


class RelayConnection:
    """A reader's connection to the process that relays.

    Attributes:
        number: number of the name at which it was found.
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        connection.settimeout(ASK_SECONDS)
        self.number = number
        self._connection = connection
        self._mapped: mmap.mmap | None = None

    def next_chunk(self) -> bytes | None:
        """Return the chunk of a new version; None: none yet.

        Raises:
            TimeoutError: the other end hangs.
            OSError: the other end is gone.
            WireError: the message cannot be used.
        """
        for _ in range(MOST_ASKED):
            self._connection.send(_ASK)
            with suppress(TimeoutError):
                return self._take(*receive(self._connection, 2 * _MOST_CHUNK_BYTES))
        raise TimeoutError("the process that relays weights hangs")

    def lease(self, slot: int, size: int) -> memoryview:
        """Return the memory of the last version; see `SharedMemoryReader.lease`."""
        mapped, self._mapped = self._mapped, None
        if mapped is None or size > len(mapped):
            raise WireError(f"{size} bytes of weights were relayed without their memory")
        return np.ndarray(size, np.uint8, mapped).data.toreadonly()  # [size]

    def interrupt(self) -> None:
        """End `next_chunk`, from another thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _take(self, message: bytes, memory: SharedMemory | None) -> bytes | None:
        if message == _NOTHING:
            return None
        if memory is None:  # this process has no room for it
            raise WireError("weights were relayed without their memory")
        try:
            self._mapped = memory.map_read_only()
        except (OSError, ValueError) as error:
            # Memory of another relay could not be mapped either.
            why = getattr(error, "strerror", None) or error
            raise WireError(f"weights cannot be mapped here: {why}") from error
        return message[OFFER.size :]
