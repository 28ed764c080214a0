"""Sets up shared memory between both ends of a call.

A client chooses a token and sends it in the metadata of its call. The learner has a second socket
next to its gRPC socket. A process that connects to it and sends the token of an open call is the
other end of that call. Only processes of the same user may connect: directory and socket are
private to this user. Either end may be the `SharedMemoryReader` or the `SharedMemoryWriter`.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

import grpc

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.streams.shared_directory import (
    abstract_name,
    dial,
    is_of_this_user,
    listen,
    path_in_shared_directory,
    remove,
)
from juggler.runtime.streams.shared_memory import (
    SharedMemory,
    SharedMemoryReader,
    SharedMemoryWriter,
    least_bytes,
)
from juggler.runtime.wire.errors import WireError

MEMORY_METADATA = "juggler-memory"

E = TypeVar("E", SharedMemoryReader, SharedMemoryWriter)
#: Takes a connection, or its input; if a connection's taking raises an error, it is closed.
Take = Callable[[socket.socket], None]

_PROBE_SECONDS = 1.0  # a thread of the server only has to be woken
_ANSWER_SECONDS = 10.0  # the server may wait for a core; without an answer, nothing is ever shared
_TOKEN_BYTES = 32
_TOKEN_SECONDS = 1.0  # a client sends its token at once
_TAKEN = b"+"  # the answer to a token
_BACKLOG = 1024

_open: set[MemorySocket] = set()  # sockets of this process


def memory_path(address: str) -> str:
    """Return where a server's memory socket is; "": none over TCP."""
    if path := path_in_shared_directory(address) or abstract_name(address):
        return path
    return f"{address.removeprefix('unix:')}.memory" if address.startswith("unix:") else ""


def connect(path: str, token: str, seconds: float = 1.0) -> socket.socket:
    """Connect to a process of this host and user.

    Args:
        path: of its socket.
        token: the token.
        seconds: maximum wait for its answer.

    Raises:
        ConnectionResetError: it refuses this connection, or is gone.
        TimeoutError: it does not answer.
        OSError: there is no listener.
    """
    connection = dial(path, seconds)
    try:
        connection.send(token.encode())
        if connection.recv(len(_TAKEN)) != _TAKEN:
            raise ConnectionResetError("the process that listens there refuses the connection")
    except BaseException:
        connection.close()
        raise
    return connection


class MemorySocket:
    """Listens alongside a gRPC server, and passes connections to their calls.

    One thread waits for all of its sockets.
    """

    def __init__(self, *addresses: str) -> None:
        """Start to listen.

        Args:
            addresses: of the gRPC server, "unix:path"; or of `shared_directory`.

        Raises:
            OSError: it cannot listen.
        """
        self._listeners: list[socket.socket] = []
        self._files: list[tuple[str, os.stat_result]] = []  # in the shared directory
        try:
            for address in addresses:
                self._listen(address)
        except BaseException:
            self.stop_listening()
            raise
        # Forked processes have to close it: they would keep accepting connections.
        _open.add(self)
        self._lock = threading.Lock()
        self._expected: dict[str, Take] = {}  # by token
        self._silent: dict[socket.socket, float] = {}  # without a token so far, since when
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._end, ending = socket.socketpair()
        self.watch(ending, lambda _: None)
        for listener in self._listeners:
            self.watch(listener, self._accept)
        self._thread = threading.Thread(target=self._run, name="memory-socket", daemon=True)
        self._thread.start()

    def _listen(self, address: str) -> None:
        path = memory_path(address)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listeners.append(listener)
        if path_in_shared_directory(address):
            self._files.append((path, listen(listener, path, _BACKLOG)))
        elif abstract_name(address):
            listener.bind(path)
            listener.listen(_BACKLOG)
        else:
            with suppress(FileNotFoundError):
                os.unlink(path)  # a killed predecessor leaves its socket behind
            listener.bind(path)
            os.chmod(path, 0o600)  # before any process can connect
            listener.listen(_BACKLOG)

    def expect(self, token: str, take: Take) -> None:
        """Pass connections with this token to `take`, which must not wait."""
        with self._lock:
            self._expected[token] = take

    def forget(self, token: str) -> None:
        """Refuse connections with this token from now on."""
        with self._lock:
            self._expected.pop(token, None)

    def watch(self, connection: socket.socket, readable: Take) -> None:
        """Call `readable` in this object's thread whenever a socket has input."""
        self._selector.register(connection, selectors.EVENT_READ, readable)

    def drop(self, connection: socket.socket) -> None:
        """Close a watched connection."""
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        """Close all sockets that are watched. Idempotent."""
        for path, place in self._files:
            with suppress(OSError):  # then the next process that listens there removes it
                remove(path, place)
        self._files.clear()
        self._closed.set()
        with suppress(OSError):  # it is closed; a forked process may hold the other end's duplicate
            self._end.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop_listening(self) -> None:
        """Close the listening sockets, but keep the files."""
        _open.discard(self)
        for each in self._listeners:
            each.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(_TOKEN_SECONDS if self._silent else None):
                # One connection at fault must not end the others.
                try:
                    key.data(key.fileobj)
                except Exception:
                    traceback.print_exc()
                    if key.fileobj not in self._listeners:
                        with suppress(KeyError, ValueError):  # it is closed already
                            self.drop(cast("socket.socket", key.fileobj))
            # After all input is read: a token may have waited for this thread.
            for connection, since in list(self._silent.items()):
                if time.monotonic() - since > _TOKEN_SECONDS:
                    del self._silent[connection]
                    self.drop(connection)
        self.stop_listening()
        self._end.close()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # no free descriptor
            self._closed.wait(0.05)
            return
        # Abstract names are open to all users, and these may not use up the descriptors.
        if not is_of_this_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._silent[connection] = time.monotonic()
        self.watch(connection, self._identify)

    def _identify(self, connection: socket.socket) -> None:
        """Pass a connection to its call, or close it."""
        self._selector.unregister(connection)
        del self._silent[connection]
        try:
            token = connection.recv(_TOKEN_BYTES).decode("ascii", "replace")
            # Under the lock, so that a call which has just ended cannot get the connection.
            with self._lock:
                if take := self._expected.get(token):
                    connection.send(_TAKEN)
                    take(connection)
                    return
        except OSError:  # the client is gone
            pass
        except Exception:
            traceback.print_exc()
        connection.close()


def _close_in_child() -> None:
    """Close the listening socket in a forked process."""
    for each in list(_open):
        each.stop_listening()


os.register_at_fork(after_in_child=_close_in_child)


class _MemoryEnd(Generic[E]):
    """One end of a call.

    Attributes:
        end: of the connection; None: not connected.
    """

    end: E | None = None

    def lease(self, slot: int, size: int) -> memoryview:
        """Lease memory: see `SharedMemoryReader.lease`.

        Raises:
            WireError: this end is not a reader.
        """
        if not isinstance(self.end, SharedMemoryReader):
            raise WireError("a payload in shared memory, which this stream does not share")
        return self.end.lease(slot, size)


class ServerEnd(_MemoryEnd[E]):
    """The server's end of one call."""

    def __init__(
        self,
        memory: MemorySocket | None,
        context: grpc.ServicerContext,
        make_end: Callable[[socket.socket], E],
    ) -> None:
        self._memory = memory
        self._make_end: Callable[[socket.socket], E] = make_end
        self._token = str(dict(context.invocation_metadata()).get(MEMORY_METADATA, ""))
        if memory is not None and self._token:
            memory.expect(self._token, self._take)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.forget(self._token)
        if self.end is not None:
            self.end.close()

    def _take(self, connection: socket.socket) -> None:
        self.end = self._make_end(connection)


class ClientEnd(_MemoryEnd[E]):
    """The client's end of one call."""

    def __init__(
        self,
        address: str,
        make_end: Callable[[socket.socket], E],
        inline: Callable[[str], None] | None,
        memory: str,
    ) -> None:
        """Prepare to share memory with a server.

        Args:
            address: of the server; over TCP, nothing is shared unless `memory` is given.
            make_end: makes the end of a connection.
            inline: called with the reason, for people, if nothing is shared although both ends are
                on one host.
            memory: the address of the server's socket in the shared directory; "": none.
        """
        self._make_end: Callable[[socket.socket], E] = make_end
        self._inline = inline
        self._least = least_bytes()
        self._path = memory_path(memory or address) if self._least is not None else ""
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._lock = threading.Lock()
        self._due = bool(self._path)
        self._wanted = False

    def in_metadata(self, metadata: CallMetadata) -> CallMetadata:
        """Return the metadata of the call, with the token."""
        return (*metadata, (MEMORY_METADATA, self._token)) if self._path else metadata

    def _dial(self) -> None:
        if not (self._due and self._wanted):
            return
        with self._lock:
            if not self._due:
                return
            self._due = False
            why = ""
            try:
                self.end = self._make_end(connect(self._path, self._token, _ANSWER_SECONDS))
                if isinstance(self.end, SharedMemoryReader):
                    self.end.wait_for_probe(_PROBE_SECONDS)  # then the next payload can be shared
            except OSError as error:
                why = f"{error.strerror or error}"
        if why:
            self.give_up(why)

    def is_large(self, size: int) -> bool:
        """Return whether a payload is large enough for shared memory."""
        large = self._least is not None and size >= self._least
        self._wanted |= large
        return large

    def receive_offers(self) -> None:
        """Connect, once; a reader also maps offered memory.

        Raises:
            WireError: as for `SharedMemoryReader.receive_offers`.
        """
        self._dial()
        if isinstance(self.end, SharedMemoryReader):
            self.end.receive_offers()
            if self.end.why_not:
                self.give_up(self.end.why_not)

    def take_frozen(self) -> SharedMemory | None:
        """Return the memory that was leased last, for a relay; None: impossible."""
        end = self.end
        if not isinstance(end, SharedMemoryReader):
            return None
        memory, end.frozen = end.frozen, None
        return memory

    def give_up(self, why: str) -> None:
        """Stop sharing memory, and report it."""
        self.close()
        if self._inline is not None:
            self._inline(f"sends through sockets instead of shared memory: {self._path}: {why}")
            self._inline = None

    def close(self) -> None:
        with self._lock:
            self._due = False
            end, self.end = self.end, None
        if end is not None:
            end.close()
