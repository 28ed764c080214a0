"""Directories in which processes find each other's sockets.

Containers of one host share one directory; each user has one.

A socket in this directory can be reached wherever the directory is mounted, by processes of the
same kernel. The directory has only sockets. A killed process leaves its socket behind; it is
removed by the next process that listens there, and by runs of this host as they start and end.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.temporary import boot_id, is_ours_alone
from juggler.runtime.plain_files import try_lock

SHARED_DIR_VARIABLE = "JUGGLER_SHARED_DIR"

_PREFIX = "unix-shared:"
_TRIES, _TRY_SECONDS = 100, 0.02  # to lock the directory, which other processes lock briefly


def shared_directory() -> str:
    """Return the directory; "": this process has none.

    Raises:
        EndpointError: it cannot be used, or other users may write in it.
    """
    path = os.environ.get(SHARED_DIR_VARIABLE, "")
    if not path:
        return ""
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unusable(path, f"{error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or not os.path.isabs(path):
        raise _unusable(path, "this is not the absolute path of a directory")
    if not is_ours_alone(found):
        raise _unusable(path, "other users may write there; chown it to this one, with mode 0700")
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise _unusable(path, "this user may not write there")
    return path


def _unusable(path: str, why: str) -> EndpointError:
    return EndpointError(
        f"{SHARED_DIR_VARIABLE}={path}: {why}. Containers of one host share memory through the "
        "sockets in this directory: mount the same volume there in each of them, or unset the "
        "variable"
    )


def shared_address(name: str) -> str:
    """Return the address of a named socket in the shared directory.

    "": this process has no directory.

    Raises:
        EndpointError: as for `shared_directory`.
    """
    directory = shared_directory()
    return _address(directory, name) if directory else ""


def users_address(name: str, *, make: bool) -> str:
    """Return the address of a socket in a directory of this user.

    Shared by all processes of the user with the same directory for temporary files.

    Args:
        name: of the socket.
        make: whether to make the directory if it is missing. If not, there is no listener.

    Raises:
        OSError: the directory is impossible, or belongs to another user.
    """
    path = _users_directory()
    if make:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    if make or os.path.lexists(path):
        _must_be_the_users(path)
    return _address(path, name)


def _must_be_the_users(path: str) -> None:
    found = os.lstat(path)
    if not is_ours_alone(found) or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} is not a directory in which only this user may write")


def _users_directory() -> str:
    return os.path.join(tempfile.gettempdir(), f"juggler-{os.geteuid()}")


def _address(directory: str, name: str) -> str:
    return f"{_PREFIX}{directory}/{_of_this_kernel()}{name}"


def learner_socket(token: str, run_id: str, incarnation: str) -> str:
    """Return the address at which a learner shares memory; see `shared_address`."""
    named = "\0".join(("learner", run_id, incarnation))
    return shared_address(hmac.new(token.encode(), named.encode(), "sha256").hexdigest()[:32])


def path_in_shared_directory(address: str) -> str:
    """Return an address's path in a shared directory, or ""."""
    return address.removeprefix(_PREFIX) if address.startswith(_PREFIX) else ""


def dial(path: str, seconds: float | None) -> socket.socket:
    """Connect to a socket, whose path may have any length.

    Args:
        path: of the socket.
        seconds: the timeout of the connection; None: it never blocks.

    Raises:
        OSError: there is no listener.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(0.0 if seconds is None else seconds)
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(found).st_mode):
                raise OSError(errno.ENOTSOCK, f"{path} is not a socket")
            connection.connect(f"/proc/self/fd/{found}")
        finally:
            os.close(found)
    except BaseException:
        connection.close()
        raise
    return connection


def listen(listener: socket.socket, path: str, backlog: int) -> str:
    """Listen at a path in the directory.

    Removes sockets of killed processes there.

    Returns:
        The socket's identity, for `remove`.

    Raises:
        OSError: another process listens there (EADDRINUSE), or listening is impossible.
    """
    directory, name = os.path.split(path)
    with _locked(directory) as held:
        _remove_abandoned(held)
        os.fchmod(listener.fileno(), 0o600)  # the file gets its mode from this
        listener.bind(f"/proc/self/fd/{held}/{name}")
        listener.listen(backlog)
        return _place(os.stat(name, dir_fd=held))


def remove(path: str, place: str) -> None:
    """Remove a socket at which this process listens.

    Also removes the user's directory if it is empty. `place` is from `listen`.

    Raises:
        OSError: removal is impossible.
    """
    directory, name = os.path.split(path)
    with _locked(directory) as held:
        if _place(os.stat(name, dir_fd=held, follow_symlinks=False)) == place:
            os.unlink(name, dir_fd=held)
        _remove_if_empty(directory)


def remove_abandoned() -> None:
    """Remove sockets of killed processes in the shared and the user's directory."""
    with suppress(EndpointError, OSError):
        if directory := shared_directory():
            with _locked(directory) as held:
                _remove_abandoned(held)
    directory = _users_directory()
    with suppress(OSError):  # mostly because it does not exist
        _must_be_the_users(directory)
        with _locked(directory) as held:
            _remove_abandoned(held)
            _remove_if_empty(directory)


def _remove_if_empty(directory: str) -> None:
    if directory == _users_directory():
        with suppress(OSError):  # it is not empty
            os.rmdir(directory)


@contextmanager
def _locked(directory: str) -> Iterator[int]:
    """Open the directory, locked against other processes' changes."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for left in reversed(range(_TRIES)):
            locked = try_lock(held)
            if locked:
                break
            # Without locks, one process could remove another's new socket.
            if locked is None:
                raise OSError(errno.ENOLCK, f"the file system of {directory} has no locks")
            if not left:
                raise TimeoutError(f"another process keeps {directory} locked")
            time.sleep(_TRY_SECONDS)
        try:
            yield held
        finally:  # a child forked in between would keep the lock
            fcntl.flock(held, fcntl.LOCK_UN)
    finally:
        os.close(held)


def _remove_abandoned(held: int) -> None:
    """Remove the sockets of this kernel's processes without a listener."""
    for each in os.scandir(held):
        if boot_id() and each.name.startswith(_of_this_kernel()):
            try:
                dial(f"/proc/self/fd/{held}/{each.name}", None).close()
            except ConnectionRefusedError:
                with suppress(FileNotFoundError):
                    os.unlink(each.name, dir_fd=held)
            except OSError:  # its queue is full, it is another user's, or not a socket
                pass


def _of_this_kernel() -> str:
    """Prefix of this kernel's names.

    Processes with the directory mounted may run on another kernel, as on another host. Their
    sockets look abandoned from here.
    """
    return f"juggler-{boot_id()}-"


def _place(found: os.stat_result) -> str:
    """Identify a file.

    While it exists, no other file can have the same identity.
    """
    return f"{found.st_ino}.{found.st_ctime_ns}"
