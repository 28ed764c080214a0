"""Relays a learner's weights once to each host.

One reader of a host relays the learner's weights to the other readers.

The readers of one learner's weights on one host meet at a Unix socket, whose name is derived from
a shared secret, in the directory that containers share, or else in a directory of this user. The
first to bind it *relays*: only it reads from the learner. When its process ends, the path is free,
and another reader takes its place at once. A relay that hangs keeps its name; a reader without an
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
import os
import select
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.streams.memory_socket import MemorySocket, connect, memory_path
from juggler.runtime.streams.shared_directory import shared_address, users_address
from juggler.runtime.streams.shared_memory import (
    OFFER,
    FrozenFrame,
    SharedMemory,
    map_file,
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

    def address(self, number: int, *, make: bool = False) -> str:
        """Return the address of a name.

        Args:
            number: of the name.
            make: whether to make the directory if it is missing.

        Raises:
            OSError: there is no directory to meet in.
        """
        name = self._derived(f"name {number}")
        with suppress(EndpointError):  # the streams to learners report it
            if shared := shared_address(name):
                return shared
        return users_address(name, make=make)

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
            OSError: other processes have all the names and do not answer; or there is no directory
                to meet in.
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
            address = self.address(number, make=may_relay)
            try:
                found = connect(memory_path(address), self.token, MOST_ASKED * ASK_SECONDS)
                return RelayConnection(found, number)
            except (ConnectionRefusedError, FileNotFoundError):  # there is no listener
                if not may_relay:
                    return None
                try:
                    return WeightsRelay(self, address)
                except OSError as error:
                    # Another reader was faster, or the last one removed the directory.
                    if error.errno not in (errno.EADDRINUSE, errno.ENOENT):
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
        self._frame: WeightsFrame | None = frame
        self._chunk, self._memory = chunk, memory

    def send_to(self, connection: socket.socket) -> None:
        """Send the version to a reader.

        Raises:
            CannotRelay: this process cannot relay it.
            OSError: the reader is gone, or does not read.
        """
        if self._frame is not None:
            try:
                if self._memory is None:
                    frozen = FrozenFrame(self._frame.header, self._frame.tree)
                    self._chunk, self._memory = frozen.chunk(0), frozen.memory
            except OSError as error:
                raise CannotRelay(f"{error.strerror} for a version of weights") from error
            self._frame = None
        if len(self._chunk) > _MOST_CHUNK_BYTES:
            raise CannotRelay("the weights have too many arrays to be relayed")
        assert self._memory is not None
        self._memory.hand_over(connection, 0, self._chunk)


@dataclass(slots=True)
class _WeightsReader:
    """A reader, as known to its relay."""

    had: _RelayedVersion | None = None
    waits: bool = False


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
        self._readers: dict[socket.socket, _WeightsReader] = {}
        self._selector = selectors.DefaultSelector()
        self._ending, self._end = socket.socketpair()
        self._selector.register(self._ending, selectors.EVENT_READ)
        # Started once the name is bound: without it, there is nothing to relay.
        self._thread = threading.Thread(target=self._run, name="weights-relay", daemon=True)
        try:
            self._socket = MemorySocket(address)
        except OSError:
            self._close_all()
            raise
        self._socket.expect(meeting.token, self._add_reader, once=False)
        self._thread.start()

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
            for connection, reader in list(self._readers.items()):
                if reader.waits:
                    self._send_newest(connection, reader)
            return self._why_not

    def close(self) -> None:
        self._socket.close()
        self._end.close()
        self._thread.join()

    def _add_reader(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ)
            self._readers[connection] = _WeightsReader()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ending:
                    self._close_all()
                    return
                assert isinstance(key.fileobj, socket.socket)
                with self._lock:
                    self._receive(key.fileobj)
            if self._why_not:  # at once, so that no reader waits in vain
                self._socket.close()
                self._close_all()
                return

    def _receive(self, connection: socket.socket) -> None:
        reader = self._readers.get(connection)
        if reader is None:
            return
        try:
            if connection.recv(1) != _ASK:
                self._drop(connection)
            elif self._newest is not None and self._newest is not reader.had:
                self._send_newest(connection, reader)
            else:
                if reader.waits:
                    connection.send(_NOTHING)
                reader.waits = not reader.waits
        except OSError:
            self._drop(connection)

    def _send_newest(self, connection: socket.socket, reader: _WeightsReader) -> None:
        assert self._newest is not None
        reader.had, reader.waits = self._newest, False
        try:
            self._newest.send_to(connection)
        except CannotRelay as error:
            self._why_not = str(error)
            self._drop(connection)
        except OSError:  # it is gone, or does not read; it may come back
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._readers[connection]
        connection.close()

    def _close_all(self) -> None:
        with self._lock:
            for connection in self._readers:
                connection.close()
            self._readers.clear()
            self._newest = None
        self._selector.close()
        self._ending.close()
        self._end.close()


class RelayConnection:
    """A reader's connection to the process that relays.

    Attributes:
        number: number of the name at which it was found.
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        connection.setblocking(False)
        self.number = number
        self._connection = connection
        self._mapped: mmap.mmap | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def next_chunk(self) -> bytes | None:
        """Return the chunk of a new version; None: none yet.

        Raises:
            TimeoutError: the other end hangs.
            OSError: the other end is gone.
            WireError: the message cannot be used.
        """
        for _ in range(MOST_ASKED):
            self._connection.send(_ASK)
            if self._poll.poll(1000 * ASK_SECONDS):
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

    def _take(self, message: bytes, descriptors: list[int]) -> bytes | None:
        try:
            if not message:
                raise ConnectionResetError("the process that relayed weights is gone")
            if message == _NOTHING:
                return None
            if not descriptors:  # this process has no room for it
                raise WireError("weights were relayed without their memory")
            try:
                size = OFFER.unpack_from(message)[1]
                self._mapped = map_file(descriptors[0], size, mmap.PROT_READ)
            except (OSError, ValueError, struct.error) as error:
                # Descriptors of another relay could not be mapped either.
                why = getattr(error, "strerror", None) or error
                raise WireError(f"weights cannot be mapped here: {why}") from error
            return message[OFFER.size :]
        finally:
            for each in descriptors:
                os.close(each)
