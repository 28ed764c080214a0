"""`juggler healthcheck`: for containers, whether a process lives, or is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from juggler.cli.arguments import parse, report_errors


@dataclass(kw_only=True)
class Arguments:
    """Ask a process how it is. Exits with 0 where it serves, else with 1; says so in one line."""

    address: tyro.conf.Positional[str] = "127.0.0.1:5005"
    """HOST:PORT, or unix:PATH, of a driver, a learner, or what --health-bind says."""

    service: str = ""
    """"readiness", or one of its services by name; by default, whether the process lives at all."""

    tls: str | None = None
    """A directory with ca.pem, cert.pem and key.pem; or set JUGGLER_TLS."""

    timeout: float = 5.0
    """Seconds to wait for the answer."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "healthcheck")
    return report_errors("healthcheck", lambda: _check(given))


def _check(given: Arguments) -> int:
    from juggler.runtime.actors.endpoints import split_address
    from juggler.runtime.actors.health import check_health
    from juggler.runtime.actors.tls import read_tls

    if not given.address.startswith("unix:"):
        split_address(given.address)
    problem = check_health(given.address, given.service, read_tls(given.tls), given.timeout)
    of = given.service or "the process"
    print(f"{given.address}: {of} {f'does not serve: {problem}' if problem else 'serves'}")
    return 1 if problem else 0
