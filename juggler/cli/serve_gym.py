"""`juggler serve-gym`: serves a Gymnasium environment to clients of dm_env_rpc."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from juggler.cli.arguments import Flag, parse, report_errors


@dataclass(kw_only=True)
class Arguments:
    """Serve an environment over dm_env_rpc, to any number of clients, until Ctrl-C."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """A Gymnasium id, "module:id" if a module must be imported first, or "module:callable"."""

    bind: str = "127.0.0.1:0"
    """Address to listen on, HOST:PORT. Port 0: any free port."""

    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""

    setting: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A keyword of the constructor that clients may set when they create a world; repeat for each
    one. They may always set seed."""

    token_file: str | None = None
    """A file with the secret that clients must show; or set JUGGLER_TOKEN_FILE, or JUGGLER_TOKEN.
    """

    tls: str | None = None
    """A directory with ca.pem, cert.pem, key.pem and perhaps a token, as `juggler certs` makes it;
    or set JUGGLER_TLS."""

    insecure: Flag = False
    """Listen beyond loopback without TLS or without a token: only on a network that you trust."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "serve-gym")
    return report_errors("serve-gym", lambda: _serve(given))


def _serve(given: Arguments) -> int:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    from juggler.envrunner.dm_env_rpc.server import GymServer
    from juggler.envrunner.environments.naming import find_environment
    from juggler.runtime.actors.credentials import read_token
    from juggler.runtime.actors.tls import read_tls

    tls = read_tls(given.tls)
    source = find_environment(given.env)
    make = functools.partial(gymnasium.make, source) if isinstance(source, EnvSpec) else source
    server = GymServer(
        functools.partial(make, **given.env_kwargs),
        given.bind,
        settings=given.setting,
        token=read_token(given.token_file, tls),
        tls=tls,
        insecure=given.insecure,
    )
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    print(f"serving {given.env} at dm_env_rpc://{server.address}", flush=True)
    over.wait()
    if not server.close():
        print("juggler serve-gym: an environment hangs; left without it", file=sys.stderr)
        os._exit(1)  # else the interpreter waits for its thread
    return 0
