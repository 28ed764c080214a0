"""`juggler certs`: makes certificates and a token, for TLS between the hosts of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import parse, report_errors
from juggler.runtime.installing import installing

_MOST_DAYS = 36_500.0


@dataclass(kw_only=True)
class Arguments:
    """Make an authority, a certificate that it signs, and a token, for all hosts of a run."""

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIRECTORY")]
    """Where to put ca.pem, cert.pem, key.pem and token: the value for --tls."""

    host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A name or IP address by which the driver or a learner is dialed; repeat for each one.
    Loopback is always included."""

    days: float = 365.0
    """How many days the certificate is valid."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "certs")
    return report_errors("certs", lambda: _make(given))


def _make(given: Arguments) -> int:
    if not 0 < given.days <= _MOST_DAYS:
        raise ValueError(f"--days {given.days:g}: must be above 0, and {_MOST_DAYS:.0f} at most")
    try:
        from juggler.runtime.actors.certificates import make_certificates
    except ImportError as error:
        raise ValueError(
            f"certificates need a package that is not installed ({error}): {installing('certs')}"
        ) from error
    try:
        files = make_certificates(Path(given.directory), given.host, given.days)
    except OSError as error:
        print(f"juggler certs: {error}", file=sys.stderr)
        return 1
    for file in files:
        print(file)
    print(
        f"Copy {given.directory} to every host of the run, and give each command --tls. Whoever "
        "can read it can join the run."
    )
    return 0
