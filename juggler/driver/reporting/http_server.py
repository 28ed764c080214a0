"""HTTP server of metrics and page, with TLS and token."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from juggler.runtime.actors.credentials import Strangers, why_not_admitted
from juggler.runtime.actors.endpoints import is_loopback
from juggler.runtime.actors.tls import Tls

Application = Callable[..., Iterable[bytes]]

_CLIENT_SECONDS = 10.0  # after the last byte from a client
_LOOK_SECONDS = 0.1  # between two checks whether to end
_MOST_STRANGERS = 64  # connections at once that have not shown the token


class HttpServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in its own thread.

    Args:
        token: that clients must send; "": none.
        tls: of this host; None: plain HTTP.
        mutual: whether clients need a certificate of its authority too.
        open_paths: paths that are served without the token.
        any_host: whether requests may use any host name. If so, a Web site could point its own name
            at this host and have a browser read the answers.
    """

    daemon_threads = True
    request_queue_size = 128  # connections not yet accepted

    def __init__(
        self,
        host: str,
        port: int,
        application: Application,
        token: str,
        tls: Tls | None,
        *,
        mutual: bool = True,
        open_paths: Collection[str] = (),
        any_host: bool,
    ) -> None:
        (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        super().__init__(address[:2], _QuietHandler)  # type: ignore[arg-type]
        self._tls, self._mutual = tls, mutual
        self._strangers = Strangers(_MOST_STRANGERS)
        self._of_thread = threading.local()  # the visit, which ends once the token was shown
        self._any_host = any_host
        self._application, self._token, self._open_paths = application, token, open_paths
        self.set_app(self._answer)

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """Serve in a thread of this name during the `with` block."""
        thread = threading.Thread(
            target=self.serve_forever, args=(_LOOK_SECONDS,), name=name, daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join(timeout=5)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer in the connection's thread: a silent client delays no other."""
        request.settimeout(_CLIENT_SECONDS)
        with request.dup() as twin, ExitStack() as visit:  # TLS takes the socket itself
            visit.enter_context(self._strangers.visit(lambda: _hang_up(twin)))
            self._of_thread.visit = visit
            self._serve(request, client_address)

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Pass on a request that has the token or needs none."""
        host = str(environ.get("HTTP_HOST", ""))
        if not self._any_host and not _is_here(host):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            why = (
                f"without a token, only this host itself is served, not {host[:255]!r}: use "
                "http://localhost, or start the command with a token\n"
            )
            return [why.encode(errors="replace")]
        # The page itself asks for the token, so its files are served without it.
        if environ.get("PATH_INFO") in self._open_paths:
            return self._application(environ, start_response)
        shown = (("authorization", str(environ.get("HTTP_AUTHORIZATION", ""))),)
        if (refusal := why_not_admitted(shown, self._token)) is not None:
            headers = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
            start_response("401 Unauthorized", headers)
            return [f"{refusal}\n".encode()]
        if self._token:
            self._of_thread.visit.close()  # the client has shown the token
        return self._application(environ, start_response)

    def _serve(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            return super().finish_request(request, client_address)
        try:
            context = self._tls.server_context(mutual=self._mutual)
        except (ValueError, OSError) as error:
            print(f"juggler: cannot answer over HTTPS: {error}", file=sys.stderr)
            return None
        with context.wrap_socket(request, server_side=True) as secure:
            super().finish_request(secure, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up or have no certificate."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _is_here(host: str) -> bool:
    """Return whether a request names this host, with any port."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    return is_loopback((name if port.isdigit() else host).strip("[]"))


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing: each scrape would add a line."""
