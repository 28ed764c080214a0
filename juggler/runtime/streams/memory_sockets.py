"""The Unix sockets over which the two ends of a stream share memory.

A client shows a token of its own choice in the metadata of its call. Beside the learner's socket
for gRPC there is a second one; whoever connects to it and proves that it knows the token of an open
call is the other end of that call. That is all that these sockets are for.

No token goes over such a socket. Each end sends a keyed hash of the socket's place, which no other
one has had. So a hash that was sent to one of them is of no use at another.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.streams.shared_directory import (
    dial,
    listen,
    path_in_shared_directory,
    remove,
)

MEMORY_METADATA = "juggler-memory"

_TOKEN_BYTES = 32  # hexadecimal
_MOST_SHOWN = 128  # bytes: more than a proof has
_MOST_STRANGERS = 64  # connections that have not shown a token
_STRANGER_SECONDS = 5.0
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("iII")  # process, user, group

_open: set[MemorySocket] = set()  # of this process

#: Takes a connection with whoever knew a token; where that raises, the connection is closed.
Take = Callable[[socket.socket], None]


def memory_path(address: str) -> str:
    """The path of the socket beside a gRPC server's "unix:path", or of an address in a shared
    directory; "": there is none over TCP."""
    if path := path_in_shared_directory(address):
        return path
    return f"{address.removeprefix('unix:')}.memory" if address.startswith("unix:") else ""


@dataclass(frozen=True, slots=True)
class _Expected:
    """A client that is let in.

    Attributes:
        answer: what it is sent.
        take: gets the connection.
        once: all of its proofs, which are forgotten with the first connection; empty: it may
            connect again.
    """

    answer: bytes
    take: Take
    once: tuple[bytes, ...]


def new_token() -> str:
    return secrets.token_hex(_TOKEN_BYTES // 2)


def token_in(metadata: CallMetadata) -> str:
    """The token in a call's metadata; "": it has none."""
    token = dict(metadata).get(MEMORY_METADATA, "")
    return token if isinstance(token, str) and len(token) == _TOKEN_BYTES else ""


def proofs(token: str, place: str) -> tuple[bytes, bytes]:
    """What a client that knows a token sends to the socket in a place, and what it is answered."""

    def proof(whose: str) -> bytes:
        return hmac.new(token.encode(), f"{whose} {place}".encode(), "sha256").hexdigest().encode()

    return proof("client"), proof("server")


def connect(path: str, token: str, seconds: float = 1.0) -> socket.socket:
    """Connect to a process of this host and user, which knows the token from an open call.

    Args:
        path: of its socket.
        token: the token.
        seconds: the longest wait for its answer.

    Raises:
        ConnectionResetError: it does not take this connection, or is gone.
        TimeoutError: it does not answer.
        OSError: nobody listens there, or it is somebody else's process.
    """
    connection, place = dial(path, seconds)
    try:
        if _user_and_process(connection)[0] != os.geteuid():
            raise PermissionError(f"another user listens at {path}")
        shown, awaited = proofs(token, place)
        connection.send(shown)
        answer = connection.recv(len(awaited))
        if not answer:
            raise ConnectionResetError("the process that listens there takes no connection")
        if not hmac.compare_digest(answer, awaited):
            raise PermissionError("what listens there does not know this connection's token")
    except BaseException:
        connection.close()
        raise
    return connection


class MemorySocket:
    """Listens beside a gRPC server.

    Strangers hold nothing: a connection without a token of an open call ends after some seconds, or
    when there are many of them, and descriptors that it sends are discarded.
    """

    def __init__(self, *addresses: str) -> None:
        """Args:
            addresses: of the gRPC server, "unix:path"; or in a shared directory.

        Raises:
            OSError: it cannot listen.
        """
        self._listeners: list[tuple[socket.socket, str]] = []  # each with its place
        self._files: list[tuple[str, str]] = []  # in the shared directory: path and place
        try:
            for address in addresses:
                self._listen(address)
        except BaseException:
            self._stop_listening()
            raise
        _open.add(self)
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Expected] = {}  # by what the client shows
        self._strangers: dict[socket.socket, float] = {}  # until when; the oldest first
        self._ending, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="memory-socket", daemon=True)
        self._thread.start()

    def _listen(self, address: str) -> None:
        path, shared = memory_path(address), bool(path_in_shared_directory(address))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listeners.append((listener, ""))
        if shared:
            listen(listener, path, _BACKLOG)
        else:
            with suppress(FileNotFoundError):
                os.unlink(path)  # a predecessor that was killed leaves its own behind
            listener.bind(path)
            os.chmod(path, 0o600)  # before anybody can connect
            listener.listen(_BACKLOG)
        listener.setblocking(False)
        itself, place = dial(path, None)
        with itself:
            if _user_and_process(itself)[1] != os.getpid():
                raise FileExistsError(f"another process has put its socket at {path}")
        self._listeners[-1] = listener, place
        if shared:
            self._files.append((path, place))

    def expect(self, token: str, take: Take, once: bool = True) -> Callable[[], None]:
        """Give a connection with who knows this token to `take`, which must not wait.

        Args:
            token: the token.
            take: gets the connection.
            once: whether the first one is the only one.

        Returns:
            Takes that back.
        """
        both = [proofs(token, place) for _, place in self._listeners]
        every = tuple(shown for shown, _ in both)
        with self._lock:
            for shown, answer in both:
                self._expected.setdefault(shown, _Expected(answer, take, every if once else ()))

        def forget() -> None:
            with self._lock:
                for shown in every:
                    if (found := self._expected.get(shown)) is not None and found.take is take:
                        del self._expected[shown]

        return forget

    def close(self) -> None:
        for path, place in self._files:
            with suppress(OSError):  # then the next process that listens there removes it
                remove(path, place)
        self._files.clear()
        self._end.close()
        self._thread.join()  # the path may be a successor's by now

    def _run(self) -> None:
        listeners = [listener for listener, _ in self._listeners]
        with selectors.DefaultSelector() as selector, self._ending:
            for each in (*listeners, self._ending):
                selector.register(each, selectors.EVENT_READ)
            while True:
                oldest = next(iter(self._strangers.values()), None)
                timeout = None if oldest is None else max(0.0, oldest - time.monotonic())
                ready = [key.fileobj for key, _ in selector.select(timeout)]
                if self._ending in ready:
                    break
                for listener in [each for each in listeners if each in ready]:
                    self._accept(listener, selector)
                for stranger in [each for each in self._strangers if each in ready]:
                    self._hear(stranger, selector)
                self._send_away(selector)
            for stranger in self._strangers:
                stranger.close()
            self._stop_listening()

    def _stop_listening(self) -> None:
        _open.discard(self)
        for listener, _ in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            stranger, _ = listener.accept()
        except OSError:  # it is gone again; or no descriptor is left, and others have to go
            if self._strangers:
                self._leave(next(iter(self._strangers)), selector).close()
            else:
                time.sleep(0.05)
            return
        if _user_and_process(stranger)[0] != os.geteuid():
            stranger.close()
            return
        stranger.setblocking(False)
        self._strangers[stranger] = time.monotonic() + _STRANGER_SECONDS
        selector.register(stranger, selectors.EVENT_READ)

    def _hear(self, stranger: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            shown = stranger.recv(_MOST_SHOWN)
        except OSError:
            shown = b""
        self._leave(stranger, selector)
        with self._lock:
            expected = self._expected.get(shown)
            if expected is None:
                stranger.close()
                return
            for each in expected.once:
                self._expected.pop(each, None)
            if not _give(stranger, expected):
                stranger.close()

    def _send_away(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for stranger, until in list(self._strangers.items()):
            if now < until and len(self._strangers) <= _MOST_STRANGERS:
                return
            self._leave(stranger, selector).close()

    def _leave(self, stranger: socket.socket, selector: selectors.BaseSelector) -> socket.socket:
        selector.unregister(stranger)
        del self._strangers[stranger]
        return stranger


def _give(stranger: socket.socket, expected: _Expected) -> bool:
    """Give a connection away, and tell whether it was taken. Whatever goes wrong ends this
    connection, and no other one."""
    try:
        stranger.send(expected.answer)
        expected.take(stranger)
    except OSError:  # it is gone again
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True


def _user_and_process(connection: socket.socket) -> tuple[int, int]:
    """The user and the id of the process at the other end; the id is 0 if it cannot be seen from
    here, as in another container."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return user, process


def _close_in_child() -> None:
    """Listen no more in a forked process, which would otherwise keep the names beyond this one's
    end."""
    for each in list(_open):
        each._stop_listening()


os.register_at_fork(after_in_child=_close_in_child)
