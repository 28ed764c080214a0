"""Places where processes of one host find each other's sockets.

Containers of one host share a directory. A socket there can be reached wherever the directory is
mounted, by processes of the same kernel. The directory has only sockets. A killed process leaves
its socket behind; it is removed by the next process that listens there, and by runs of this host as
they start and end.

Without a directory, processes meet at an abstract name, which Linux frees with its process. Other
users may know it, so both ends check their peer's user.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import stat
import struct
from contextlib import suppress

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.temporary import boot_id, is_ours_alone

SHARED_DIR_VARIABLE = "JUGGLER_SHARED_DIR"

_PREFIX, _ABSTRACT_PREFIX = "unix-shared:", "unix-abstract:"
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a connection's other end


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
    return f"{_PREFIX}{directory}/{_of_this_kernel()}{name}" if directory else ""


def abstract_address(name: str) -> str:
    """Return the address of a named socket for processes of this user."""
    return f"{_ABSTRACT_PREFIX}juggler-{name}"


def is_of_this_user(connection: socket.socket) -> bool:
    """Return whether a Unix connection's other end has this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()


def learner_socket(token: str, run_id: str, incarnation: str) -> str:
    """Return the address at which a learner shares memory; see `shared_address`."""
    named = "\0".join(("learner", run_id, incarnation))
    return shared_address(hmac.new(token.encode(), named.encode(), "sha256").hexdigest()[:32])


def path_in_shared_directory(address: str) -> str:
    """Return an address's path in a shared directory, or ""."""
    return address.removeprefix(_PREFIX) if address.startswith(_PREFIX) else ""


def abstract_name(address: str) -> str:
    """Return an address's abstract name, after a zero byte, or ""."""
    if not address.startswith(_ABSTRACT_PREFIX):
        return ""
    return f"\0{address.removeprefix(_ABSTRACT_PREFIX)}"


def dial(path: str, seconds: float | None) -> socket.socket:
    """Connect to a socket, whose path may have any length.

    Args:
        path: of the socket; or its abstract name.
        seconds: the timeout of the connection; None: it never blocks.

    Raises:
        PermissionError: another user listens at the abstract name.
        OSError: there is no listener.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(0.0 if seconds is None else seconds)
        if path.startswith("\0"):
            connection.connect(path)
            if not is_of_this_user(connection):
                raise PermissionError(errno.EPERM, "a process of another user listens there")
            return connection
        # Its descriptor is a short path to it.
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


def listen(listener: socket.socket, path: str, backlog: int) -> os.stat_result:
    """Listen at a path in the directory.

    Removes sockets of killed processes there.

    Returns:
        The socket's identity, for `remove`.

    Raises:
        OSError: another process listens there (EADDRINUSE), or listening is impossible.
    """
    directory, name = os.path.split(path)
    _remove_abandoned(directory)
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # A socket gets its name once it listens: until then, it would look abandoned.
    new = f"new-{secrets.token_hex(8)}"
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file gets its mode from this
        listener.bind(f"/proc/self/fd/{held}/{new}")
        try:
            listener.listen(backlog)
            os.link(new, name, src_dir_fd=held, dst_dir_fd=held)
            return os.stat(new, dir_fd=held)
        except FileExistsError:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
        finally:
            os.unlink(new, dir_fd=held)
    finally:
        os.close(held)


def remove(path: str, place: os.stat_result) -> None:
    """Remove a socket at which this process listens; `place` is from `listen`.

    Raises:
        OSError: removal is impossible.
    """
    if os.path.samestat(os.lstat(path), place):
        os.unlink(path)


def remove_abandoned() -> None:
    """Remove sockets of killed processes in the shared directory."""
    with suppress(EndpointError, OSError):
        if directory := shared_directory():
            _remove_abandoned(directory)


def _remove_abandoned(directory: str) -> None:
    """Remove the sockets of this kernel's processes without a listener."""
    for each in os.scandir(directory):
        if boot_id() and each.name.startswith(_of_this_kernel()):
            try:
                dial(each.path, None).close()
            except ConnectionRefusedError:
                _remove_unless_alive(each.path)
            except OSError:  # its queue is full, it is another user's, or not a socket
                pass


def _remove_unless_alive(path: str) -> None:
    """Remove an abandoned socket, unless another process has replaced it."""
    aside = f"{os.path.dirname(path)}/old-{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        is_alive = True
        with suppress(OSError):  # its queue is full
            try:
                dial(aside, None).close()
            except ConnectionRefusedError:
                is_alive = False
        if is_alive:
            os.rename(aside, path)
        else:
            os.unlink(aside)


def _of_this_kernel() -> str:
    """Prefix of this kernel's names.

    Processes with the directory mounted may run on another kernel, as on another host. Their
    sockets look abandoned from here.
    """
    return f"juggler-{boot_id()}-"
