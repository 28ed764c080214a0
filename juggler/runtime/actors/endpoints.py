"""Addresses, options and errors of gRPC servers and channels."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import Message

from juggler.runtime.actors.credentials import TOKEN_VARIABLE
from juggler.runtime.actors.tls import TLS_VARIABLE, Tls, why_no_handshake
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES

PROTOCOL_VERSION = 10

_LOOK_SECONDS = 0.5
_REPORT_SECONDS, _MOST_REPORTS = 5.0, 20
_LONGEST_REPORT_SECONDS = 30.0  # even if there are more reports

_SIZES = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
_KEEPALIVE = [
    # On an idle stream, a cut network is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The same holds for a peer that no longer answers although a proxy accepts its bytes.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_SIZES,
    *_KEEPALIVE,
    # Without this a second server would silently share the port.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # For one connection; a worker has one or two streams on each of its connections.
    ("grpc.max_concurrent_streams", 16),
]
#: Options of a server that detects silent peers itself. After a process was stopped (by Ctrl-Z, or
#: a paused container), gRPC believes that no peer has answered a ping.
WATCHFUL_SERVER_OPTIONS = list(
    {
        **dict(SERVER_OPTIONS),
        "grpc.keepalive_timeout_ms": 600_000,
        "grpc.http2.ping_timeout_ms": 600_000,
    }.items()
)
CHANNEL_OPTIONS = [
    *_SIZES,
    # One connection per channel: channels of one process must not share a socket's flow control.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # gRPC would itself retry a call that an ending server did not accept. With grpcio 1.85.1,
    # about 1 % of these calls hang, and some lose a message of a stream.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class EndpointError(RuntimeError):
    """An address cannot be bound or reached.

    Attributes:
        traceback: empty, because the message is enough.
    """

    traceback = ""


def must_fit(message: Message, what: str) -> None:
    """Check that gRPC can carry a message, instead of a broken connection.

    Raises:
        EndpointError: it is too large.
    """
    if (size := message.ByteSize()) > MAX_MESSAGE_BYTES:
        raise EndpointError(
            f"{what} has {size / (1 << 20):.1f} MiB, over the limit of {MAX_MESSAGE_BYTES >> 20} "
            "MiB: make its values smaller or fewer, such as infos, metrics or options"
        )


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into ("host", port); IPv6 hosts are in brackets.

    Raises:
        EndpointError: the text is not an address of this form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535 or not host:
        raise EndpointError(
            f"{address!r} is not an address: expected HOST:PORT, as in 0.0.0.0:5005"
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port: the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(
    server: Any,
    address: str,
    *,
    token: str = "",
    tls: Tls | None = None,
    insecure: bool = False,
) -> str:
    """Bind a gRPC server (sync or aio) to "host:port" or "unix:path".

    Args:
        server: the server.
        address: "host:port" or "unix:path". Only its owner may use a Unix socket, and it has no
            TLS.
        token: the token that calls must show; "": none.
        tls: of this host; None: connections have no TLS.
        insecure: listen beyond loopback even without TLS or without a token.

    Returns:
        The bound address, with the chosen port if port 0 was requested.

    Raises:
        EndpointError: the port or path is taken, the host does not belong to this machine, or other
            machines could reach the address and `insecure` is not set.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        try:
            taken = _listens(path)
            if not taken:
                _add_private_socket(server, path)
        except (RuntimeError, OSError) as error:
            raise EndpointError(
                f"cannot listen at {address}: choose a path of less than 108 bytes in a directory "
                "that exists, and in which this user may write"
            ) from error
        # gRPC replaces an existing socket, so a second server would cut off the first one.
        if taken:
            raise EndpointError(
                f"cannot listen at {address}: another process listens there. Choose another path, "
                "or stop that process"
            )
        return address
    # From here on, other machines may be able to reach the address.
    host, port = split_address(address)
    if not insecure and not is_loopback(host):
        _must_be_protected(address, token, tls)
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise EndpointError(_why_not_bound(host, port)) from error
    if bound == 0:
        raise EndpointError(_why_not_bound(host, port))
    return join_address(host, bound)


def _listens(path: str) -> bool:
    """Return whether a process listens at a Unix socket.

    Raises:
        OSError: this user may not connect, or the path is not a socket.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_LOOK_SECONDS)
        try:
            probe.connect(path)
        except TimeoutError:  # too many connections wait to be accepted
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def _add_private_socket(server: Any, path: str) -> None:
    """Bind a server to a Unix socket of its owner alone.

    It replaces a stale socket.
    """
    # The mask holds for all threads. A directory that another thread makes now stays usable.
    mask = os.umask(0o077)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(mask)
    os.chmod(path, 0o600)


def _must_be_protected(address: str, token: str, tls: Tls | None) -> None:
    if tls is not None and token:
        return
    if tls is None:
        missing = "nothing is encrypted"
        remedy = f"--tls DIR, which `juggler certs DIR` makes, or set {TLS_VARIABLE}"
    else:
        missing = "there is no token"
        remedy = f"--token-file FILE, or set {TOKEN_VARIABLE}, or put it into {tls.directory}"
    raise EndpointError(
        f"refusing to listen on {address}: other machines could reach it, and {missing}. "
        f"Pass {remedy}; or --insecure on a network that you trust; or bind to 127.0.0.1"
    )


def _why_not_bound(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
        reason = ""
    except OSError as error:
        reason = f": {error.strerror or error}"
    return f"cannot listen on {host}:{port}{reason}. Choose another address or port"


def make_server(max_streams: int) -> grpc.Server:
    """Make a server for data streams.

    Each open stream holds one thread, created when it is needed. A stream beyond `max_streams` is
    refused; a stream beyond the limit of its connection waits.
    """
    pool = futures.ThreadPoolExecutor(max_streams, thread_name_prefix="stream")
    return grpc.server(pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_streams)


def dial(address: str, tls: Tls | None = None, *, one_thread: bool = False) -> grpc.Channel:
    """Make a channel to "host:port" or "unix:path".

    It connects when it is first used.

    Args:
        address: a Unix socket is dialed without TLS. A host must have a certificate for this name
            or IP address.
        tls: of this host; None: no TLS.
        one_thread: read a server's stream in the thread that asks for its messages, instead of
            another thread; this saves a third of the time per message.
    """
    # A grpcio that does not know this experimental option ignores it.
    own = (("SingleThreadedUnaryStream", 1),) if one_thread else ()
    # On one host, the kernel reports when the other end is gone; a stopped process comes back.
    keepalive = () if address.startswith("unix:") else _KEEPALIVE
    options = (*CHANNEL_OPTIONS, *keepalive, *own)
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)


def wait_until_ready(
    channel: grpc.Channel,
    address: str,
    peer: str,
    timeout: float,
    tls: Tls | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Wait until a channel is connected.

    `report` is called with a line every few seconds, and more seldom in a long wait.

    Raises:
        EndpointError: no server answered within `timeout` seconds, or TLS keeps failing.
    """
    ready = grpc.channel_ready_future(channel)
    deadline = time.monotonic() + timeout
    refused, reported_at = "", time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        try:
            return ready.result(timeout=min(left, _LOOK_SECONDS))
        except grpc.FutureTimeoutError:
            # gRPC does not report why TLS fails, so a second connection finds out.
            found = why_not_secure(address, peer, tls)
            if found and found == refused:  # a single refusal may be a server that just ended
                raise EndpointError(refused) from None
            # On a busy host, the second connection may get no answer; if there is none, the server
            # that refused has ended.
            if found or (refused and _why_no_connection(address)):
                refused = found
            # More seldom in a long wait.
            pause = min(timeout / _MOST_REPORTS, _LONGEST_REPORT_SECONDS)
            if time.monotonic() - reported_at >= max(_REPORT_SECONDS, pause):
                reported_at = time.monotonic()
                why = _why_no_connection(address)
                what = "" if why else refused
                what = what or f"no {peer} answers at {address} yet{why}"
                left = max(0.0, deadline - time.monotonic())
                report(f"{what}: waiting {left:.0f} s more")
    why = _why_no_connection(address)
    raise EndpointError(
        ("" if why else refused)
        or f"no {peer} answers at {address}{why}: waited {timeout:.0f} s. "
        "Is it running, is the address right, and can this host reach it?"
    )


def _why_no_connection(address: str) -> str:
    """Explain why no connection is made, as in " (Connection refused)".

    "": a connection is made. This takes at most a second, plus the time to look up a name.
    """
    if address.startswith("unix:"):
        return ""
    try:
        socket.create_connection(split_address(address), timeout=1.0).close()
    except OSError as error:
        return f" ({error.strerror or error})"
    return ""


def no_driver(address: str) -> str:
    """Describe that the server at an address is not a driver."""
    return (
        f"the server at {address} is not a driver, but perhaps a learner or a gateway: give the "
        "address that the driver prints as it starts"
    )


def why_not_secure(address: str, peer: str, tls: Tls | None) -> str:
    """Explain the problem with TLS at an address.

    "": TLS is not the problem.

    Takes at most a few seconds.
    """
    if address.startswith("unix:"):
        return ""
    host, port = split_address(address)
    return why_no_handshake(address, host, port, tls, peer)
