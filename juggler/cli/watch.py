"""`juggler watch`: a page in the browser about runs."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from juggler.cli.arguments import Flag, parse, report_errors
from juggler.cli.runs import DEFAULT


@dataclass(kw_only=True)
class Arguments:
    """Serve a page about runs, for a browser: those that go on, and those that are over. It reads
    their directories, and no run notices. Ctrl-C ends it."""

    runs: tyro.conf.Positional[tuple[str, ...]] = (DEFAULT,)
    """Directories of runs, or runs: several are compared."""

    bind: str | None = None
    """Address to serve at, HOST:PORT. none: 127.0.0.1:7070, or the first port after that which is
    free."""

    token_file: str | None = None
    """A file with a secret that the page asks for; or set JUGGLER_TOKEN_FILE, or JUGGLER_TOKEN.
    Beyond loopback there has to be one."""

    tls: str | None = None
    """A directory with ca.pem, cert.pem, key.pem and perhaps a token, as `juggler certs` makes it,
    for HTTPS; or set JUGGLER_TLS."""

    insecure: Flag = False
    """Serve beyond loopback without encryption: only on a network that you trust."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "watch")
    return report_errors("watch", lambda: _watch(given))


def _watch(given: Arguments) -> int:
    from juggler.driver.watching.overview import find_runs
    from juggler.driver.watching.serving import serve_page
    from juggler.runtime.actors.credentials import read_token
    from juggler.runtime.actors.tls import read_tls

    directories = [Path(each) for each in given.runs]
    is_default = given.runs == (DEFAULT,)
    # Somebody may watch before there is a run.
    found = [] if is_default and not directories[0].exists() else find_runs(directories)
    tls = read_tls(given.tls)
    with serve_page(
        directories,
        given.bind,
        named=len(directories) > 1,
        token=(token := read_token(given.token_file, tls)),
        tls=tls,
        insecure=given.insecure,
    ) as address:
        count = "1 run" if len(found) == 1 else f"{len(found)} runs"
        asks = ", which asks for the token" if token else ""
        print(f"watching {count} at {address}{asks} (Ctrl-C ends this)", flush=True)
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return 0  # Ctrl-C is the usual way to end it
