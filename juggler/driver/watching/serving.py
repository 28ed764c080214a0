"""Serves the page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EADDRINUSE
from pathlib import Path
from typing import Final

from juggler.driver.record.http_server import HttpServer
from juggler.driver.watching.app import OPEN_PATHS, PageApplication
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.tls import Tls

#: Where the page is, or at the first port after that which is free.
DEFAULT_BIND: Final = "127.0.0.1:7070"
_MORE_PORTS: Final = 20
_LOOK_SECONDS: Final = 0.1  # between two looks whether to end


@contextmanager
def serve_page(
    directories: list[Path],
    bind: str | None = None,
    *,
    named: bool = False,
    token: str = "",
    tls: Tls | None = None,
    insecure: bool = False,
) -> Iterator[str]:
    """Serve the page, and yield its address.

    Args:
        directories: of runs, or runs.
        bind: "host:port"; None: this host alone, at a port that is free.
        named: see `PageApplication`.
        token: which the page asks for; "": none.
        tls: of this host; None: plain HTTP.
        insecure: allow other machines to read it without TLS.

    Raises:
        EndpointError: the address cannot be bound, or must not be.
    """
    host, port = split_address(bind or DEFAULT_BIND)
    is_here = is_loopback(host)
    if not is_here and not (token and (tls or insecure)):
        lacking = "nothing would be encrypted" if token else "there is no token to ask for"
        raise EndpointError(
            f"refusing to serve the page on {bind}: other machines could read it, and {lacking}. "
            "Give --tls and a token, as `juggler certs` makes both; or --insecure and --token-file "
            "on a network that you trust; or bind to 127.0.0.1, and look from elsewhere through "
            f"`ssh -L {port or 7070}:127.0.0.1:{port or 7070} HOST`"
        )
    application = PageApplication(directories, named=named)
    ports = [port] if bind else [*range(port, port + _MORE_PORTS), 0]
    server = _bound(host, ports, application, token, tls)
    thread = threading.Thread(
        target=server.serve_forever, args=(_LOOK_SECONDS,), name="page", daemon=True
    )
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"{'https' if tls else 'http'}://{shown}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
        application.close()


def _bound(
    host: str, ports: list[int], application: PageApplication, token: str, tls: Tls | None
) -> HttpServer:
    """
    Raises:
        EndpointError: none of the ports can be bound.
    """
    for port in ports:
        try:
            return HttpServer(
                host,
                port,
                application,
                token,
                tls,
                mutual=False,
                open_paths=OPEN_PATHS,
                any_host=bool(token),
            )
        except OSError as error:
            if error.errno != EADDRINUSE or port == ports[-1]:
                raise EndpointError(
                    f"cannot serve the page on {host}:{port}: {error.strerror or error}. Choose "
                    "another --bind, or leave it out for a port that is free"
                ) from error
    raise AssertionError("there is a last port")
