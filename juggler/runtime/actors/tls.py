"""TLS: certificates, trust, and reasons for failed handshakes.

TLS is mutual: a client verifies its server by the authority's certificate, and a server admits no
peer without a certificate of that authority. Only the page for browsers admits clients without one.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

TLS_VARIABLE = "JUGGLER_TLS"

#: The authority's certificate, this host's certificate signed by it, and this host's private key.
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
#: Optional file: the token of the run.
TOKEN = "token"

_PROBE_SECONDS = 3.0
_MADE_BY = "`juggler certs` makes this directory"


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files of a directory; see `read_tls`.

    Later connections use the current files, if they are complete.
    """

    directory: str
    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self.server_configuration(),
            _Renewal(self),  # type: ignore[arg-type]  # gRPC: None means no change
            require_client_authentication=True,
        )

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.authority
        )

    def server_context(self, *, mutual: bool = True) -> ssl.SSLContext:
        """Make the context for one connection, from the current files.

        Args:
            mutual: whether clients also need a certificate, which browsers do not have.

        Raises:
            ValueError: the files are damaged, or being replaced.
            OSError: one of them is gone.
        """
        context = _context(Path(self.directory), ssl.PROTOCOL_TLS_SERVER)
        if not mutual:
            context.verify_mode = ssl.CERT_NONE
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        now = self.renewed()
        return grpc.ssl_channel_credentials(now.authority, now.key, now.certificate)

    def renewed(self) -> Tls:
        """Read the current files; keep this object if they are bad."""
        try:
            return read_tls(self.directory) or self
        except (ValueError, OSError):  # a file may have disappeared
            return self

    def is_in_directory(self) -> bool:
        """Return whether the directory still has the files that were read."""
        given = {AUTHORITY: self.authority, CERTIFICATE: self.certificate, KEY: self.key}
        try:
            return all(Path(self.directory, n).read_bytes() == given[n] for n in given)
        except OSError:
            return False


class _Renewal:
    """Gives a server its files for each connection; None: unchanged."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        if self._tls.is_in_directory():
            return None
        before, self._tls = self._tls, self._tls.renewed()
        return None if self._tls is before else self._tls.server_configuration()


def read_tls(directory: str | None) -> Tls | None:
    """Read the files of this directory, or of JUGGLER_TLS; otherwise None.

    Raises:
        ValueError: a file is missing or not PEM, the key does not belong to the certificate, or the
            authority would not accept the certificate.
    """
    directory = directory or os.environ.get(TLS_VARIABLE) or None
    if directory is None:
        return None
    authority = _pem(Path(directory, AUTHORITY), b"CERTIFICATE-----")
    certificate = _pem(Path(directory, CERTIFICATE), b"CERTIFICATE-----")
    key = _pem(Path(directory, KEY), b"PRIVATE KEY-----")
    _check(Path(directory))
    return Tls(directory, authority, certificate, key)


def why_no_handshake(address: str, host: str, port: int, tls: Tls | None, peer: str) -> str:
    """Explain why a channel to a reachable server does not open.

    "": TLS is not the reason.

    gRPC's own message does not name the side that refuses.

    Args:
        address: as configured.
        host: of the server.
        port: of the server.
        tls: of this host; None if it dials without TLS.
        peer: the server's role, for people.
    """
    if tls is not None and not tls.renewed().is_in_directory():
        return ""  # the channel has other files, and another handshake
    try:
        raw = socket.create_connection((host, port), timeout=_PROBE_SECONDS)
    except OSError:
        return ""
    # gRPC reports all failures alike, so the handshake is repeated here.
    with raw:
        try:
            _shake_hands(raw, host, tls)
        except ssl.SSLCertVerificationError as error:
            assert tls is not None
            return (
                f"this host does not accept the certificate of the {peer} at {address}: "
                f"{error.verify_message.rstrip('.')}. It must be signed by the authority in "
                f"{tls.directory}/{AUTHORITY} and name the host as it is dialed here"
            )
        # The server refused, or does not speak TLS.
        except ssl.SSLError as error:
            return _refusal(error, address, tls, peer)
        except OSError:  # the server is silent, or hangs up
            return ""
    if tls is None:
        return _speaks_tls(address, peer)
    return ""


def _shake_hands(raw: socket.socket, host: str, tls: Tls | None) -> None:
    if tls is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = _context(Path(tls.directory), ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = True
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(raw, server_hostname=host, suppress_ragged_eofs=False) as secure:
        if tls is not None:
            secure.recv(1)  # a TLS 1.3 server checks certificates after the handshake


def _refusal(error: ssl.SSLError, address: str, tls: Tls | None, peer: str) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    # gRPC servers hang up on a certificate that they do not accept; other servers send an alert.
    hangs_up = isinstance(error, ssl.SSLEOFError) or "alert" in reason
    if tls is None:
        return _speaks_tls(address, peer) if "alert" in reason else ""
    if hangs_up:
        return (
            f"the {peer} at {address} does not accept the certificate of this host, "
            f"{tls.directory}/{CERTIFICATE}: it closed the connection. Is it signed by "
            f"{AUTHORITY} of the {peer}, and has it expired?"
        )
    return f"the {peer} at {address} does not speak TLS ({reason}): pass --tls on both sides"


def _speaks_tls(address: str, peer: str) -> str:
    return f"the {peer} at {address} speaks TLS: pass --tls DIR here too ({_MADE_BY})"


def _pem(path: Path, what: bytes) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: TLS needs {AUTHORITY}, {CERTIFICATE} and {KEY} there; {_MADE_BY}"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if what not in content:
        kind = what.decode().rstrip("-").lower()
        raise ValueError(f"{path} holds no {kind} in PEM, which begins with -----BEGIN")
    if b"ENCRYPTED" in content:
        raise ValueError(f"{path} needs a passphrase: take a key without one")
    return content


def _check(directory: Path) -> None:
    """Verify the certificate in a handshake within this process.

    Raises:
        ValueError: peers would refuse it; names the reason.
    """
    server = _context(directory, ssl.PROTOCOL_TLS_SERVER)
    client = _context(directory, ssl.PROTOCOL_TLS_CLIENT)
    for authority in client.get_ca_certs():
        if ssl.cert_time_to_seconds(str(authority["notAfter"])) < time.time():
            raise ValueError(
                f"the authority's certificate {directory / AUTHORITY} expired on "
                f"{authority['notAfter']}: make a new directory with `juggler certs`"
            )
    # A handshake in memory finds every fault that peers would find.
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, True)]
    try:
        while ends:
            ends = [end for end in ends if not _got_through(end)]
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"{directory / CERTIFICATE}, as verified by {AUTHORITY}: "
            f"{error.verify_message.rstrip('.')}"
        ) from error
    except ssl.SSLError as error:
        raise ValueError(f"{directory / CERTIFICATE}: {error.reason or error}") from error


def _got_through(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _context(directory: Path, side: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(directory / AUTHORITY)
    except ssl.SSLError as error:
        raise ValueError(f"{directory / AUTHORITY} is damaged: {error.reason or error}") from error
    # OpenSSL's own texts name no file.
    try:
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"{directory / KEY} is not the key of {directory / CERTIFICATE}"
            ) from error
        raise ValueError(
            f"{directory / CERTIFICATE} or {directory / KEY} is damaged: {error.reason or error}"
        ) from error
    return context
