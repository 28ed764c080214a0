"""The HTTP server behind /metrics, with TLS and a token where there are any."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.strangers import Strangers
from juggler.runtime.actors.tls import Tls

Application = Callable[..., Iterable[bytes]]

_CLIENT_SECONDS = 10.0  # without a byte from one
_MOST_STRANGERS = 64  # connections at once that have not shown the token


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread of its own.

    Args:
        host: where to listen; port 0 takes any.
        application: has what is asked for.
        token: that whoever asks has to show as a bearer; "": none.
        tls: of this host, for which whoever asks needs a certificate of its authority; None: plain.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that come at once

    def __init__(
        self, host: str, port: int, application: Application, token: str, tls: Tls | None
    ) -> None:
        (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        super().__init__(address[:2], _QuietHandler)  # type: ignore[arg-type]
        self._tls = tls
        self._strangers = Strangers(_MOST_STRANGERS)
        self._of_thread = threading.local()  # its visit, of which it is let off by the token
        self.set_app(_Guarded(application, token, self._is_known))

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread, so that who says nothing holds up nobody else."""
        request.settimeout(_CLIENT_SECONDS)
        with request.dup() as twin, ExitStack() as visit:  # TLS takes the socket itself
            visit.enter_context(self._strangers.visit(lambda: _hang_up(twin)))
            self._of_thread.visit = visit
            self._serve(request, client_address)

    def _is_known(self) -> None:
        """Whoever this thread serves has shown the token."""
        self._of_thread.visit.close()

    def _serve(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            return super().finish_request(request, client_address)
        try:
            context = self._tls.server_context()
        except (ValueError, OSError) as error:
            print(f"juggler driver: cannot answer on /metrics: {error}", file=sys.stderr)
            return None
        with context.wrap_socket(request, server_side=True) as secure:
            super().finish_request(secure, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who hangs up, or has no certificate, is told so by TLS; it is no failure of the run."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nobody wants a line for each scrape."""


class _Guarded:
    """An application for those who know the token. Calls `is_known` where somebody has shown it."""

    def __init__(self, application: Application, token: str, is_known: Callable[[], None]) -> None:
        self._application = application
        self._token = token
        self._is_known = is_known

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        shown = (("authorization", str(environ.get("HTTP_AUTHORIZATION", ""))),)
        if (refusal := why_not_admitted(shown, self._token)) is None:
            if self._token:
                self._is_known()
            return self._application(environ, start_response)
        headers = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
        start_response("401 Unauthorized", headers)
        return [f"{refusal}\n".encode()]
