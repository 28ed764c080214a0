"""`juggler healthcheck`: checks whether a process is alive or ready, for containers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from juggler.cli.arguments import parse, report_errors


@dataclass(kw_only=True)
class Arguments:
    """Check the health of a process. Exits with 0 if it serves, else with 1, and says why in one
    line."""

    address: tyro.conf.Positional[str] = "127.0.0.1:5005"
    """HOST:PORT, or unix:PATH, of a driver, of a learner, or of --health-bind."""

    service: str = ""
    """"readiness", or the name of one of its services. By default, whether the process is alive."""

    tls: str | None = None
    """A directory with ca.pem, cert.pem and key.pem; or set JUGGLER_TLS."""

    timeout: float = 5.0
    """How many seconds to wait for the answer."""


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
