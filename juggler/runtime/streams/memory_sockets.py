"""The Unix sockets over which the two ends of a stream share memory.

A client shows a token of its own choice in the metadata of its call. Beside the learner's socket
for gRPC there is a second one; who connects to it and shows a token of an open call is the other
end of that call. That is all that these sockets are for.
"""

from __future__ import annotations

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

from juggler.runtime.actors.credentials import CallMetadata

MEMORY_METADATA = "juggler-memory"

_ABSTRACT = "unix-abstract:"
_TOKEN_BYTES = 32  # hexadecimal
_MOST_STRANGERS = 64  # connections that have not shown a token
_STRANGER_SECONDS = 5.0
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("iII")  # process, user, group

#: Takes a connection with whoever knew a token; where that raises, the connection is closed.
Taken = Callable[[socket.socket], None]


def memory_path(address: str) -> str:
    """The path of the socket beside a gRPC server's "unix:path"; "": there is none over TCP. A
    name in "unix-abstract:name" has no file, and is free again when its process ends."""
    if address.startswith(_ABSTRACT):
        return f"\0{address.removeprefix(_ABSTRACT)}"
    return f"{address.removeprefix('unix:')}.memory" if address.startswith("unix:") else ""


def new_token() -> str:
    return secrets.token_hex(_TOKEN_BYTES // 2)


def token_in(metadata: CallMetadata) -> str:
    """The token in a call's metadata; "": it has none."""
    token = dict(metadata).get(MEMORY_METADATA, "")
    return token if isinstance(token, str) and len(token) == _TOKEN_BYTES else ""


def connect(path: str, token: str) -> socket.socket:
    """Connect to a process of this host and user, which knows the token from an open call.

    Raises:
        OSError: nobody listens there, or it is somebody else's process.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(1.0)
        connection.connect(path)
        if not _is_ours(connection):
            raise PermissionError(f"another user listens at {path}")
        connection.send(token.encode())
    except BaseException:
        connection.close()
        raise
    return connection


class MemorySocket:
    """Listens beside a gRPC server.

    Strangers hold nothing: a connection without a token of an open call ends after some seconds, or
    when there are many of them, and descriptors that it sends are discarded.
    """

    def __init__(self, address: str) -> None:
        """Args:
            address: of the gRPC server, "unix:path"; or "unix-abstract:name", of no server.

        Raises:
            OSError: it cannot listen.
        """
        path = memory_path(address)
        has_file = not address.startswith(_ABSTRACT)
        if has_file:
            with suppress(FileNotFoundError):
                os.unlink(path)  # a predecessor that was killed leaves its own behind
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(path)
            if has_file:
                os.chmod(path, 0o600)  # before anybody can connect
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._lock = threading.Lock()
        self._expected: dict[str, Taken] = {}  # by token, once
        self._always: dict[str, Taken] = {}  # by token
        self._strangers: dict[socket.socket, float] = {}  # until when; the oldest first
        self._ending, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="memory-socket", daemon=True)
        self._thread.start()

    def expect(self, token: str, taken: Taken) -> Callable[[], None]:
        """Give the first connection that shows this token to `taken`, which must not wait.

        Returns:
            Takes that back.
        """
        with self._lock:
            self._expected.setdefault(token, taken)

        def forget() -> None:
            with self._lock:
                if self._expected.get(token) is taken:
                    del self._expected[token]

        return forget

    def expect_many(self, token: str, taken: Taken) -> None:
        """Give every connection that shows this token to `taken`, which must not wait."""
        with self._lock:
            self._always[token] = taken

    def close(self) -> None:
        self._end.close()
        self._thread.join()  # the path may be a successor's by now

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._ending:
            for each in (self._listener, self._ending):
                selector.register(each, selectors.EVENT_READ)
            while True:
                oldest = next(iter(self._strangers.values()), None)
                timeout = None if oldest is None else max(0.0, oldest - time.monotonic())
                ready = [key.fileobj for key, _ in selector.select(timeout)]
                if self._ending in ready:
                    break
                if self._listener in ready:
                    self._accept(selector)
                for stranger in [each for each in self._strangers if each in ready]:
                    self._hear(stranger, selector)
                self._send_away(selector)
            for stranger in self._strangers:
                stranger.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            stranger, _ = self._listener.accept()
        except OSError:  # it is gone again; or no descriptor is left, and others have to go
            if self._strangers:
                self._leave(next(iter(self._strangers)), selector).close()
            else:
                time.sleep(0.05)
            return
        if not _is_ours(stranger):
            stranger.close()
            return
        stranger.setblocking(False)
        self._strangers[stranger] = time.monotonic() + _STRANGER_SECONDS
        selector.register(stranger, selectors.EVENT_READ)

    def _hear(self, stranger: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            token = stranger.recv(2 * _TOKEN_BYTES).decode("ascii", "replace")
        except OSError:
            token = ""
        self._leave(stranger, selector)
        with self._lock:
            taken = self._expected.pop(token, None) or self._always.get(token)
            if taken is None or not _is_taken(stranger, taken):
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


def _is_taken(stranger: socket.socket, taken: Taken) -> bool:
    """Give a connection away. Whatever goes wrong ends this connection, and no other one."""
    try:
        taken(stranger)
    except OSError:  # it is gone again
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this process's user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
